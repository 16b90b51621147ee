"""One rank of the real trainer on a fake GPU: `python -m tests.fake_cuda.rank GUARD MODEL RANK WORLD TOKENS FLAGS`.

GUARD is the compiled guard.cpp, MODEL a folder with config.json, or 0.5B or 3B: that of `tools/gpu_check.py`. Builds
the trainer, trains on one row of TOKENS tokens (0: not at all) and steps, lends all memory and takes it back. Prints
JSON: bytes that live on the device, peaks, and where the host waited for it, for each of these.

What it cannot follow: TransformerEngine, stages of a pipeline that tell each other shapes, experts to whom tokens are
sent by their numbers.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tests.fake_cuda.device import FakeGPU, load_guard

SEQUENCES = 8
LAYERS = 6
GPU_CHECK = ("0.5B", "3B")


def main(guard: str, model: str, rank: str, world: str, tokens: str, *flags: str) -> None:
    load_guard(Path(guard))
    os.environ.update(RANK=rank, WORLD_SIZE=world, LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    gpu = FakeGPU()
    pretend_processes(int(rank), int(world))
    if model in GPU_CHECK:
        args, make = of_gpu_check(model)
    else:
        args = arguments(model, world, flags)
        make = None
    trainer, found = build(gpu, args, make)
    with gpu.active():
        if int(tokens):
            found |= train(gpu, trainer, args, int(tokens))
        trainer.memory.lend()
        gpu.reset()
        found["lent"] = gpu.live
        trainer.memory.take_back()
        trainer.memory.wait()
        gpu.reset()
        found["back"] = gpu.live
    print(json.dumps(found))


def pretend_processes(rank: int, world: int) -> None:
    """A process group whose other ranks answer at once, with nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    new_group = dist.new_group

    def gather(out: list[Any], value: Any, group: Any = None) -> None:
        out[:] = [value] * len(out)

    dist.all_gather_object = gather
    dist.new_group = lambda *args, backend=None, **kwargs: new_group(*args, **kwargs)


def arguments(model: str, world: str, flags: tuple[str, ...]) -> Any:
    from sleuth.arguments import check_model, parse_args, read_hf_config

    words = ["--hf-checkpoint", model, "--prompt-data", "x.jsonl", "--actor-num-gpus-per-node", world, "--colocate"]
    words += ["--custom-rm-path", "a.b", "--use-kl-loss", "--ref-load", model, "--dtype", "bfloat16"]
    args = parse_args([*words, *flags])
    return check_model(args, read_hf_config(args))


def of_gpu_check(size: str) -> tuple[Any, Any]:
    """Flags, and what makes the trainer, of `tools/gpu_check.py`, with six layers."""
    from tools.gpu_checks.size import SIZES
    from tools.gpu_checks.trainer import RandomTrainer, Settings, read_shape

    script, changes = SIZES[size]
    shape = replace(read_shape(script)[0], num_layers=LAYERS)
    RandomTrainer._load_initial_weights = lambda self: None  # type: ignore[method-assign]
    return Settings(**changes), lambda settings: RandomTrainer(settings, shape)


def build(gpu: FakeGPU, args: Any, make: Any = None) -> tuple[Any, dict[str, Any]]:
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.tensor_parallel import random

    from sleuth.megatron.trainer import Trainer

    random._get_cuda_rng_state = lambda *args, **kwargs: None
    random._set_cuda_rng_state = lambda *args, **kwargs: None
    random._get_all_rng_states = lambda: (None, None, None)
    random._set_all_rng_states = lambda *args: None
    random.CudaRNGStatesTracker.fork = contextlib.contextmanager(lambda tracker, name="": (yield))
    waiting = type("Handle", (), {"wait": lambda self: None})
    param_and_grad_buffer._coalescing_manager = lambda *args, **kwargs: contextlib.nullcontext(waiting())
    Trainer._load_initial_weights = lambda self: None  # type: ignore[method-assign]
    with gpu.active():
        trainer = (make or Trainer)(args)
    gpu.reset()
    return trainer, {"resident": gpu.live, "parts": trainer.memory.held()}


def train(gpu: FakeGPU, trainer: Any, args: Any, tokens: int) -> dict[str, Any]:
    """One optimizer step on one row: what the policy's own scoring and training takes."""
    from sleuth.megatron import forward
    from sleuth.megatron.logprobs import HeadOptions

    batch = row(gpu, args, tokens)
    found: dict[str, Any] = {}
    reference = trainer._reference.in_place() if trainer._reference else contextlib.nullcontext()
    with reference:
        (batch.ref_log_probs,) = forward.score(trainer._ddp, [batch], HeadOptions(1.0, args.log_probs_chunk_size))
    gpu.reset()
    for chunk in trainer._ddp:
        chunk.zero_grad_buffer()
    trainer.optimizer.zero_grad()
    forward.run_model(trainer._ddp, [batch], trainer._options, trainer._objective, train=True)
    found |= {"forward_backward": {"peak": gpu.peak, "waits": dict(gpu.waits), "attention": dict(gpu.attention)}}
    gpu.reset()
    trainer.optimizer.step()
    return found | {"step": {"peak": gpu.peak, "waits": dict(gpu.waits)}}


def row(gpu: FakeGPU, args: Any, tokens: int) -> Any:
    """A row of equally long samples, half of each a response. It is packed with real numbers, then moved."""
    from sleuth.algo.context_parallel import length_multiple
    from sleuth.algo.optimizer_steps import OptimizerStepBatch
    from sleuth.megatron import device, forward
    from sleuth.sample import TrainSample

    multiple = length_multiple(args)
    length = tokens * args.context_parallel_size // SEQUENCES // multiple * multiple
    half = length // 2
    samples = [
        TrainSample([1] * length, half, *[[1.0] * (length - half)] * 3, reward=1.0, index=index)
        for index in range(SEQUENCES)
    ]
    step = OptimizerStepBatch([samples], SEQUENCES, float(SEQUENCES * (length - half)))
    there = device.local_device
    device.local_device = lambda: gpu.torch.device("cpu")
    with gpu.torch._C._DisableTorchDispatch():
        batch = forward.MicroBatch.build(samples, step, multiple=multiple, per_token=False)
    device.local_device = there

    def moved(value: Any) -> Any:
        return value.to(there()) if gpu.torch.is_tensor(value) else value

    batch.local = replace(batch.local, **{f.name: moved(getattr(batch.local, f.name)) for f in fields(batch.local)})
    batch.selected, batch.weights, batch.policy_weights = map(
        moved, (batch.selected, batch.weights, batch.policy_weights)
    )
    return batch


if __name__ == "__main__":
    main(*sys.argv[1:])
