"""Convert a Hugging Face model to a torch_dist checkpoint, for --ref-load.

    python tools/convert_hf_to_torch_dist.py --hf-checkpoint Qwen2.5-3B --save Qwen2.5-3B_torch_dist
    source scripts/models/qwen2.5-3B.sh; python tools/convert_hf_to_torch_dist.py "${MODEL_ARGS[@]}" --hf-checkpoint ...

Model flags are not needed; those that are given are checked against the model's config.json.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if not __package__:  # run as a script: make the project importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sleuth.arguments import Group, ModelArgs, parse_args_or_exit, read_config
from sleuth.arguments.run_flags import DType


class ConvertGroup(Group):
    """Conversion"""

    hf_checkpoint: Path = Field(description="Folder of the Hugging Face model.")
    save: Path = Field(description="Folder for the torch_dist checkpoint; it must not hold one yet.")
    dtype: DType = Field("auto", description="Precision of the checkpoint; auto is that of config.json.")
    check: bool = Field(True, description="Compare logits of both models afterwards, if memory allows.")


class ConvertArgs(ModelArgs, ConvertGroup):
    """The flags of this tool."""


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args_or_exit(argv, model=ConvertArgs)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the host's memory is larger, and a training may hold the GPUs
    # Megatron is imported late: --help and wrong flags should answer at once.
    from sleuth.megatron.convert import hf_to_torch_dist

    columns = (TextColumn("converting"), BarColumn(), MofNCompleteColumn(), TextColumn("tensors"), TimeElapsedColumn())
    try:
        read_config(args.hf_checkpoint)
        with Progress(*columns) as bar:
            task = bar.add_task("", total=None)
            found = hf_to_torch_dist(
                args.hf_checkpoint,
                args.save,
                dtype=args.dtype,
                check=args.check,
                flags=args,
                progress=lambda _, total: bar.update(task, advance=1, total=total),
            )
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"wrote {found}; use it as --ref-load {args.save}")


if __name__ == "__main__":
    logging.captureWarnings(True)  # deprecations inside the libraries tell a user nothing
    main()
