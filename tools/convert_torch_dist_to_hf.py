"""Convert a torch_dist checkpoint to a Hugging Face model, to evaluate, serve or publish it.

    python tools/convert_torch_dist_to_hf.py --load checkpoints --hf-checkpoint Qwen2.5-3B --save trained-3B

Config and tokenizer come from --hf-checkpoint, the model that training started from.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, NonNegativeInt, PositiveFloat
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if not __package__:  # run as a script: make the project importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sleuth.arguments import Group, parse_args_or_exit
from sleuth.arguments.run_flags import DType


class ExportGroup(Group):
    """Conversion"""

    load: Path = Field(description="Folder of torch_dist checkpoints, or one checkpoint.")
    iteration: NonNegativeInt | None = Field(None, description="Step of the checkpoint to convert [the newest].")
    hf_checkpoint: Path = Field(description="Folder of the Hugging Face model that training started from.")
    save: Path = Field(description="Folder for the Hugging Face model; it must be empty or absent.")
    dtype: DType = Field("auto", description="Precision of the weights; auto is that of config.json.")
    verify: bool = Field(True, description="Compare the checkpoint's files with their checksums before it is read.")
    max_shard_size: PositiveFloat = Field(5.0, description="Largest size of one file, in GB.")
    check: bool = Field(True, description="Compare logits of both models afterwards, if memory allows.")


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args_or_exit(argv, model=ExportGroup)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the host's memory is larger, and a training may hold the GPUs
    # Megatron is imported late: --help and wrong flags should answer at once.
    from sleuth.megatron.convert import torch_dist_to_hf

    columns = (TextColumn("writing"), BarColumn(), MofNCompleteColumn(), TextColumn("tensors"), TimeElapsedColumn())
    try:
        with Progress(*columns) as bar:
            task = bar.add_task("", total=None)
            found = torch_dist_to_hf(
                args.load,
                args.hf_checkpoint,
                args.save,
                iteration=args.iteration,
                dtype=args.dtype,
                check=args.check,
                verify=args.verify,
                shard_bytes=int(args.max_shard_size * 10**9),
                progress=lambda _, total: bar.update(task, advance=1, total=total),
            )
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"wrote {args.save} from {found}")


if __name__ == "__main__":
    logging.captureWarnings(True)  # deprecations inside the libraries tell a user nothing
    main()
