"""The weights to evaluate as a Hugging Face folder: `--load`, converted in its own process, or `--hf-checkpoint`."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from sleuth.arguments import Args
from sleuth.checkpoints import saved_step

logger = logging.getLogger(__name__)


@contextmanager
def weights_to_evaluate(args: Args, run_dir: Path) -> Iterator[tuple[Args, int]]:
    """`args` with a folder of the weights as --hf-checkpoint, and their step; 0 without --load.

    The folder of a converted checkpoint, under `run_dir`, is removed at the end of the block. Raises ValueError if the
    checkpoint does not fit the model.
    """
    if args.load is None:
        yield args, 0
        return
    import torch

    folder = run_dir / "evaluated_weights"
    shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
    dtype = args.dtype
    if dtype == "auto":  # what the engines would get from a trainer
        dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    # Megatron keeps its state in the process.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        process.submit(_convert, args.load, Path(args.hf_checkpoint), folder, dtype, args.verify).result()
    try:
        yield args.model_copy(update={"hf_checkpoint": str(folder)}), saved_step(args.load) or 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _convert(load: Path, hf_checkpoint: Path, save: Path, dtype: str, verify: bool) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the host's memory is larger
    from sleuth.megatron.convert import torch_dist_to_hf

    torch_dist_to_hf(load, hf_checkpoint, save, dtype=dtype, check=False, verify=verify)
