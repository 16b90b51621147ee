"""Finds the model to evaluate: a Hugging Face folder, a model of the hub, or a torch_dist checkpoint."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import yaml

from sleuth.arguments.files_check import is_hf_folder
from sleuth.checkpoints import CONFIGURATION, find_checkpoint, holds_checkpoint

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def find_model(model: str, hf_checkpoint: str | None) -> tuple[str, Path | None]:
    """The Hugging Face folder (of a checkpoint: that of its configuration and tokenizer), and the checkpoint if any.

    Raises ValueError, with what was found, if `model` is none of the three.
    """
    folder = Path(model)
    if is_hf_folder(folder):
        return model, None
    if holds_checkpoint(folder):
        return hf_checkpoint or _trained_from(folder), folder
    if not folder.exists() and _HUB_NAME.fullmatch(model) and not folder.parent.exists():
        return download(model), None
    found = "nothing" if not folder.exists() else _listing(folder)
    raise ValueError(
        "--model: expected a Hugging Face folder (config.json), a torch_dist checkpoint "
        f"(latest_checkpointed_iteration.txt or metadata.json) or a model of the hub (owner/name), found {found} at "
        f"{model}; correct the path"
    )


def _listing(folder: Path) -> str:
    if not folder.is_dir():
        return "a file"
    names = sorted(path.name for path in folder.iterdir())
    return f"a folder with {', '.join(names[:5])}" if names else "an empty folder"


def _trained_from(folder: Path) -> str:
    """The --hf-checkpoint of the run that saved a checkpoint, if it says so and the folder is there."""
    try:
        found = find_checkpoint(folder)
        values = yaml.safe_load((found / CONFIGURATION).read_text(encoding="utf-8")) if found else {}
        source = str(values["hf_checkpoint"])
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        source, reason = "", f"found none: {CONFIGURATION} in it names none ({type(error).__name__})"
    else:
        reason = f"found none: {CONFIGURATION} in it names {source}, which is not here"
    if not is_hf_folder(Path(source)):
        raise ValueError(
            f"--model: expected the model that training started from, for the configuration and tokenizer of {folder}, "
            f"{reason}; add --hf-checkpoint with that model's folder"
        )
    return source


def download(model: str) -> str:
    """The local folder of a model of the Hugging Face hub, downloaded at its first use; ValueError if it fails."""
    from huggingface_hub import snapshot_download  # slow to import

    sys.stderr.write(f"downloading {model} from the Hugging Face hub, into its cache, unless it is there\n")
    endpoint = os.environ.get("HF_ENDPOINT") or None
    try:
        return snapshot_download(model, endpoint=endpoint, ignore_patterns=["*.bin", "*.pth", "*.gguf", "original/*"])
    except Exception as error:  # of many libraries: network, disk, the hub's own refusals
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"--model: no folder {model} here, and the Hugging Face hub did not give the model: {reason}; where there "
            f"is no network, fetch it elsewhere with `hf download {model} --local-dir FOLDER` and name the folder"
        ) from None
