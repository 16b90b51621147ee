"""Seconds to bring one GB of weights to the engines, each way, beside the memory's own speed.

    python -m benchmarks.weight_sync [--megabytes 400] [--engines 1] [--trials 2]

A random Qwen2 model in bfloat16, sent to real engines (the trainer's side is this process, with its weights at hand):
in_band in the requests, tensor by shared memory, distributed by a process group, disk by a folder in TMPDIR. Seconds
a GB from pause to continue, the best of the trials.

The floor is what one thread needs to copy the same bytes once, to memory that it has. Of an engine every way asks at
least one such copy, into its weights; a broadcast over a socket asks for another one before, out of the kernel. gloo is
that part alone: the same tensors, broadcast to a process that does nothing with them. What is left of distributed after
gloo and one copy is the requests, SGLang's loading a tensor at a time, and new pages of memory. The last line is one
JSON object: `ours` is distributed, `reference` in_band.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from benchmarks.options import whole_number
from sleuth.engine.server import EngineConfig, EngineServer
from sleuth.weight_sync.disk import load_weights_from_disk
from sleuth.weight_sync.distributed import BroadcastGroup
from sleuth.weight_sync.tensor import push_weights

GB = 1e9
GROUP_TIMEOUT = timedelta(minutes=10)


def make_model(folder: Path, megabytes: int) -> PreTrainedModel:
    """A random model of about that size, saved in `folder` without a tokenizer, which no engine needs here."""
    width = 1024
    layer = 4 * width * width + 3 * width * 4 * width  # parameters
    layers = max(1, round(megabytes * 1e6 / 2 / layer))
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return model


def best(ways: Mapping[str, Callable[[], object]], trials: int) -> dict[str, float]:
    """Seconds of each way in its fastest trial; the ways take turns, so that what else runs slows down all alike."""
    found = dict.fromkeys(ways, float("inf"))
    for _ in range(trials):
        for name, action in ways.items():
            start = time.perf_counter()
            action()
            found[name] = min(found[name], time.perf_counter() - start)
    return found


class PlainReceiver:
    """A process that takes broadcasts of tensors like these and does nothing with them."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        self._process = mp.get_context("spawn").Process(target=_receive, args=(self._store.port, shapes), daemon=True)
        self._process.start()
        self._group = dist.ProcessGroupGloo(self._store, 0, 2, GROUP_TIMEOUT)

    def send(self) -> None:
        """Broadcast all tensors; returns when the other side has them."""
        broadcast(self._group, self._tensors)
        self._group.barrier().wait()

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def broadcast(group: dist.ProcessGroupGloo, tensors: list[torch.Tensor]) -> None:
    for work in [group.broadcast([tensor]) for tensor in tensors]:
        work.wait()


def _receive(port: int, shapes: list[tuple[torch.Size, torch.dtype]]) -> None:
    torch.set_num_threads(1)
    group = dist.ProcessGroupGloo(dist.TCPStore("127.0.0.1", port, 2, is_master=False), 1, 2, GROUP_TIMEOUT)
    tensors = [torch.zeros(shape, dtype=dtype) for shape, dtype in shapes]
    while True:
        broadcast(group, tensors)
        group.barrier().wait()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=whole_number(), default=400, help="of the model, about")
    parser.add_argument("--engines", type=whole_number(), default=1)
    parser.add_argument("--trials", type=whole_number(), default=2)
    return parser.parse_args()


def main() -> None:
    args = parse_options()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = make_model(folder / "model", args.megabytes)
        tensors = dict(model.state_dict())
        size = sum(tensor.nbytes for tensor in tensors.values())
        options = ("--skip-tokenizer-init",)
        configs = [
            EngineConfig(folder / "model", dtype="bfloat16", max_total_tokens=2048, extra_args=options)
            for _ in range(args.engines)
        ]
        urls = [stack.enter_context(EngineServer(config)).url for config in configs]
        group = stack.enter_context(closing(BroadcastGroup(urls)))

        copies = [torch.zeros_like(tensor) for tensor in tensors.values()]

        def copy() -> None:
            for place, tensor in zip(copies, tensors.values(), strict=True):
                place.copy_(tensor)

        def through_disk() -> None:
            model.save_pretrained(folder / "sent")
            load_weights_from_disk(urls, folder / "sent", "disk")

        plain = stack.enter_context(closing(PlainReceiver(list(tensors.values()))))
        ways: dict[str, Callable[[], object]] = {
            "floor": copy,
            "gloo": plain.send,
            "in_band": lambda: push_weights(urls, tensors.items(), "in_band", in_band=True),
            "tensor": lambda: push_weights(urls, tensors.items(), "tensor"),
            "distributed": lambda: group.push(tensors.items(), "distributed"),
            "disk": through_disk,
        }
        load = os.getloadavg()[0]
        seconds = {name: round(value / size * GB, 3) for name, value in best(ways, args.trials).items()}
    for name, value in seconds.items():
        print(
            f"{name:12s} {value:8.2f} s/GB  {value / seconds['floor']:7.1f} x floor  "
            f"{seconds['in_band'] / value:6.1f} x as fast as in_band"
        )
    result = {"name": "weight_sync", "engines": args.engines, "gigabytes": round(size / GB, 3), "load": round(load, 1)}
    rest = seconds["distributed"] - seconds["gloo"] - seconds["floor"]
    print(f"distributed = gloo {seconds['gloo']:.2f} + one copy {seconds['floor']:.2f} + the rest {rest:.2f} s/GB")
    result |= {"seconds_per_gb": seconds, "ours": seconds["distributed"], "reference": seconds["in_band"]}
    print(json.dumps(result | {"ratio": round(seconds["in_band"] / seconds["distributed"], 1)}))


if __name__ == "__main__":
    main()
