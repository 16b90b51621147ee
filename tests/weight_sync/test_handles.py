"""Handles of shared memory: what another process makes of them, SGLang's own reader included."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from sleuth.engine.server import CPU_STUBS, PACKAGE_ROOT
from sleuth.weight_sync.buckets import flatten, size_of
from sleuth.weight_sync.handles import decode, encode, encode_bytes, shared_buffer
from sleuth.weight_sync.tensor import describe

BUCKET = [
    ("a", torch.arange(6, dtype=torch.float32).reshape(2, 3)),
    ("b", torch.tensor([1.5, -2.0], dtype=torch.bfloat16)),
]
CUDA_ARGUMENTS: tuple[Any, ...] = ("cls", "size", "stride", 0, "storage", torch.uint8, 0, b"handle", 8, 0)

SGLANG = """
import sys, torch
from types import SimpleNamespace
from sglang.srt.utils import patch_torch
from sglang.srt.utils.common import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
shared, gpu = sys.stdin.read().split()
bucket = MultiprocessingSerializer.deserialize(shared)
tensors = FlattenedTensorBucket(flattened_tensor=bucket["flattened_tensor"], metadata=bucket["metadata"])
for name, tensor in tensors.reconstruct_tensors():
    print(name, tensor.dtype, tensor.tolist())
bucket["flattened_tensor"][0] = 7  # the sender sees it

torch.cuda.device_count = lambda: 3
torch.cuda.get_device_properties = lambda number: SimpleNamespace(uuid=["x", "y", "GPU-b"][number])
patch_torch.monkey_patch_torch_reductions()
patch_torch.reductions._rebuild_cuda_tensor_original = lambda *arguments: arguments
print(MultiprocessingSerializer.deserialize(gpu)[6:8])
"""


def in_shared_memory() -> torch.Tensor:
    return flatten(BUCKET, shared_buffer(size_of(BUCKET)))


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, *uuids: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=uuids[number]))


class OnGpu(torch.Tensor):
    """Says that it lies on the only GPU that this process sees."""

    is_cuda = True  # type: ignore[assignment]
    device = 0  # type: ignore[assignment]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> str:
    pretend_gpus(monkeypatch, "GPU-b")
    monkeypatch.setattr(reductions, "reduce_tensor", lambda _: (reductions.rebuild_cuda_tensor, CUDA_ARGUMENTS))
    return encode(torch.zeros(1).as_subclass(OnGpu))


@pytest.mark.engine
def test_sglangs_own_reader_finds_the_tensors_and_the_gpu(on_gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flat = in_shared_memory()
    text = encode({"flattened_tensor": flat, "metadata": describe(BUCKET)})
    path = os.pathsep.join([str(CPU_STUBS), str(PACKAGE_ROOT)])
    env = os.environ | {"PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SGLANG], input=f"{text} {on_gpu}", env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-3:] == [
        "a torch.float32 [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]",
        "b torch.bfloat16 [1.5, -2.0]",
        "(2, b'handle')",  # the same GPU is its third
    ]
    assert flat[0] == 7, "the engine reads from the same memory, not from a copy"


def test_the_gpu_goes_by_its_uuid(on_gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, "GPU-a", "GPU-b")
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda *arguments: arguments)
    assert decode(on_gpu) == (*CUDA_ARGUMENTS[:6], 1, *CUDA_ARGUMENTS[7:])
    pretend_gpus(monkeypatch, "GPU-a")
    with pytest.raises(ValueError, match=r"expected the GPU GPU-b in CUDA_VISIBLE_DEVICES, this process sees"):
        decode(on_gpu)


def test_a_handle_is_short_and_bytes_are_not() -> None:
    flat = torch.zeros(100_000, dtype=torch.uint8)
    assert len(encode_bytes({"flattened_tensor": flat})) > 100_000
    shared = shared_buffer(100_000)
    assert len(encode({"flattened_tensor": shared})) < 1_000


def test_nothing_stays_in_shared_memory() -> None:
    before = set(Path("/dev/shm").glob("torch_*"))
    flat = in_shared_memory()
    payload = decode(encode({"flattened_tensor": flat}))
    assert payload["flattened_tensor"].tolist() == flat.tolist()
    del flat, payload
    assert set(Path("/dev/shm").glob(f"torch_{os.getpid()}_*")) <= before
