"""What the answers of an evaluation depend on. Two evaluations are compared, and one goes on, only where it agrees.

Files are known by their content, not by their place: weights by samples of their bytes, questions by their labels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sleuth.arguments import Args
from sleuth.checkpoints import find_checkpoint
from sleuth.data import PromptRow
from sleuth.secrets import masked

BLOCKS, BLOCK_BYTES = 16, 65_536
"""Of each file so many blocks, evenly spread, are read."""


def evaluation_settings(
    args: Args, model: str, rows: Mapping[str, Sequence[PromptRow]], corpus: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Everything that decides the answers, by group. `corpus` describes a retrieval server of the evaluation's own.

    `args` have all hook settings filled in. Where the servers run, and how many answers are under way, is left out.
    """
    sections = masked(args.custom_config)
    if corpus is not None:
        sections = _with_corpus(sections, dict(corpus))
    weights = Path(args.hf_checkpoint) if args.load is None else find_checkpoint(args.load) or args.load
    return {
        "model": {"name": model, "weights": digest_of(weights), "dtype": args.sglang_dtype or args.dtype},
        "data": {
            name: {"questions": len(found), "labels": _digest(_question(row) for row in found)}
            for name, found in rows.items()
        },
        "prompts": {
            "prompt_template": args.prompt_template,
            "apply_chat_template": args.apply_chat_template,
            "apply_chat_template_kwargs": args.apply_chat_template_kwargs,
            "texts": {name: _digest(repr(row.prompt) for row in found) for name, found in rows.items()},
        },
        "sampling": {
            "temperatures": args.eval_temperature,
            "samples": args.n_samples_per_eval_prompt,
            "top_p": args.eval_top_p,
            "top_k": args.rollout_top_k,
            "max_response_len": args.eval_max_response_len,
            "max_context_len": args.rollout_max_context_len,
            "stop": args.rollout_stop,
            "seed": args.seed,
        },
        "hooks": {"generate": args.custom_generate_function_path, "reward": args.custom_rm_path},
        "hook_settings": sections,
    }


def _with_corpus(sections: dict[str, Any], corpus: dict[str, str]) -> dict[str, Any]:
    """The sections with the corpus in place of the server's URL, which is another one each time."""
    found = {**sections}
    for name, section in sections.items():
        if isinstance(section, Mapping) and isinstance(section.get("local"), Mapping):
            found[name] = {**section, "local": {**section["local"], "search_url": corpus}}
    return found


def _question(row: PromptRow) -> str:
    return repr((row.index, row.metadata.get("data_source"), row.label))


def _digest(texts: Any) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode("utf-8", errors="replace") + b"\0")
    return digest.hexdigest()[:16]


def digest_of(path: Path) -> str:
    """A digest of a file, or of the files of a folder, from their names, sizes and samples of their bytes."""
    files = {"": path} if path.is_file() else {str(file.relative_to(path)): file for file in path.rglob("*")}
    digest = hashlib.sha256()
    for name, file in sorted(files.items()):
        if not file.is_file() or any(part.startswith(".") for part in Path(name).parts):
            continue
        size = file.stat().st_size
        digest.update(f"{name} {size}\0".encode())
        with file.open("rb") as content:
            for block in range(BLOCKS):
                content.seek(max(0, size - BLOCK_BYTES) * block // (BLOCKS - 1))
                digest.update(content.read(BLOCK_BYTES))
                if size <= BLOCK_BYTES:
                    break
    return digest.hexdigest()[:16]
