"""Compares the weights that a trainer will send with those of the engines' model, before anything is sent.

An engine leaves out in silence what it has no place for, and keeps what it was not sent. What it has is read from the
files of the folder that it says it serves: SGLang tells neither names nor shapes of its own parameters.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from sleuth.engine.key import engine_session

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 60.0
COMPUTED = (".rotary_emb.inv_freq",)
"""Endings of what files may hold, but every reader computes for itself."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
SHOWN = 5


def check_weights(urls: Sequence[str], weights: Mapping[str, Tensor]) -> None:
    """ValueError, which names them, unless the engines' model has exactly these weights (of which none needs values).

    Another precision than the engine's is only logged: engines convert.
    """
    for url in urls:
        with engine_session() as session:
            served = session.get(f"{url}/model_info", timeout=TIMEOUT_SECONDS).json()
            dtype = session.get(f"{url}/server_info", timeout=TIMEOUT_SECONDS).json().get("dtype")
        problems = differences({name: list(tensor.shape) for name, tensor in weights.items()}, served["model_path"])
        if problems:
            raise ValueError(
                f"the weights are not those of the model that the engine at {url} serves ({served['model_path']}), "
                "nothing was sent\n  " + "\n  ".join(problems)
            )
        ours = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()})
        if ours != [dtype]:
            logger.info("the engine at %s computes in %s, and converts the %s that it is sent", url, dtype, ours)


def differences(ours: Mapping[str, Sequence[int]], folder: str | Path) -> list[str]:
    """A sentence for each way in which shapes by name differ from those in a Hugging Face folder."""
    theirs = shapes_in(Path(folder))
    if HEAD not in ours and theirs.get(EMBEDDING) == theirs.get(HEAD):
        theirs.pop(HEAD, None)  # the embedding again: files may hold it, a trainer has one of them
    missing = [name for name in theirs if name not in ours]
    extra = [name for name in ours if name not in theirs]
    other = [
        f"{name} is {list(shape)}, expected {theirs[name]}"
        for name, shape in ours.items()
        if name in theirs and list(shape) != theirs[name]
    ]
    found = {"would not be sent": missing, "has no place there": extra, "of another shape": other}
    return [f"{trouble}: {_listed(names)}" for trouble, names in found.items() if names]


def shapes_in(folder: Path) -> dict[str, list[int]]:
    """The shapes of all tensors in a Hugging Face folder, by name; ValueError if it holds no safetensors.

    They are in the files that the index lists, if there is one.
    """
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values() if index.is_file() else []
    files = sorted({folder / file for file in listed} or folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"expected safetensors files in {folder}, which an engine serves, found none; add them")
    shapes = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                if not name.endswith(COMPUTED):
                    shapes[name] = file.get_slice(name).get_shape()
    return shapes


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
