"""Writes the tensors of a checkpoint beside other work: megatron's asynchronous save, in a thread.

    write = BackgroundWrite(state, folder)     # returns when all that it will write lies in host memory
    while not write.done(): ...                # the model may change, or lend its memory
    write.finish()                             # the folder is a whole checkpoint
    write.checksums                            # of the files that this rank wrote, for the manifest

Megatron hands out the work as a function to call and functions to finish with. Its own callers of them start processes:
one forks, which can hang where there are threads (gloo, OpenMP, Ray), the other needs CUDA. Writing to files
and waiting for the disk leave the interpreter to others, so that a thread does.
"""

from __future__ import annotations

import functools
import inspect
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async

from sleuth.manifest import Entry, entries_of
from sleuth.megatron import device, parallel

# Newer versions of megatron-core would take another library's asynchronous save.
_MEGATRONS_OWN = (
    {"async_strategy": "mcore"} if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters else {}
)


class BackgroundWrite:
    """One write of a sharded `state` to `folder`. Every method is collective."""

    def __init__(self, state: dict[str, Any], folder: Path) -> None:
        _write_in_this_process()
        filesystem_async._results_queue = queue.Queue()  # this write's own: one that failed may leave results behind
        request = dist_checkpointing.save(state, str(folder), async_sharded_save=True, **_MEGATRONS_OWN)
        self._finish: list[Callable[[], None]] = request.finalize_fns
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._folder = folder
        self.checksums: dict[str, Entry] = {}
        if request.async_fn is not None:  # this rank has something to write
            rank, buckets, results = request.async_fn_args
            work = functools.partial(request.async_fn, rank, _on_host(buckets), results)
            files = sorted({Path(path).name for path, _, _ in buckets})
            self._thread = threading.Thread(target=self._run, args=(work, files), name="checkpoint", daemon=True)
            self._thread.start()

    def done(self) -> bool:
        """Whether all ranks have written, so that `finish` does not wait."""
        running = self._thread is not None and self._thread.is_alive()
        count = torch.tensor(int(running), device=device.local_device())
        dist.all_reduce(count)
        return not count.item()

    def finish(self) -> None:
        """Wait for all ranks, then complete the folder. What went wrong on any rank is raised on all."""
        if self._thread is not None:
            self._thread.join()
        parallel.raise_together(self._error)
        for function in self._finish:
            function()

    def _run(self, work: Callable[[], None], files: list[str]) -> None:
        try:
            work()
            self.checksums = entries_of(self._folder, files)
        except Exception as error:
            self._error = error


def _on_host(buckets: list[Any]) -> list[Any]:
    """Megatron's buckets (path, name, (bytes, tensors)) with copies of the tensors that do not change any more.

    What is in host memory beside a GPU was gathered there for this save; without a GPU it may be the model itself.
    """
    without_gpu = device.local_device().type == "cpu"

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cpu", copy=without_gpu)

    return [
        (path, name, (data, [(item, copied(tensor)) for item, tensor in tensors]))
        for path, name, (data, tensors) in buckets
    ]


@functools.cache
def _write_in_this_process() -> None:
    """Keep megatron from starting processes that write files."""
    writer = filesystem_async.FileSystemWriterAsync

    def write(transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], results: queue.Queue[Any]) -> None:
        written: queue.Queue[tuple[int, Any]] = queue.Queue()
        pending: queue.Queue[int] = queue.Queue()
        for number, bucket in enumerate(buckets):
            pending.put(number)
            writer.write_preloaded_data(transforms, number, bucket, written, pending, use_fsync=True)
        outputs = dict(written.get_nowait() for _ in buckets)
        error = next((output for output in outputs.values() if isinstance(output, Exception)), None)
        results.put(error or outputs)

    writer.write_preloaded_data_multiproc = staticmethod(write)
