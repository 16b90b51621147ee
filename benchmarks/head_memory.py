"""Peak memory and time of log-probabilities and entropies of a large vocabulary, beside the plain formulation.

    python -m benchmarks.head_memory [--tokens 2048] [--trained 0.5] [--vocabulary 151936] [--hidden 256]
                                     [--chunk-size 512] [--trials 3] [--threads 1]

Each formulation runs forwards and backwards in a process of its own, on the same hidden states, weights and
targets, of which the share `--trained` has a weight in the loss. Reference: the logits of all positions as one
float32 tensor, log_softmax, gather, entropy, autograd's backward pass. A second reference leaves out the positions
that are not trained before it computes logits. Both heads are measured with the entropy as a metric (as with
--entropy-coef 0) and with a gradient through it. "tp2" is ours with the vocabulary over two processes; its memory is
that of one of them.

Memory is the peak above what the process held before the first pass (resident memory; on CUDA, allocated memory),
so it includes the gradients. Time is the median of the passes. How far results are from the reference's is
printed and checked. The last line is one JSON object; its ratio is peak memory, ours / reference.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks.options import positive, whole_number

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Problem:
    """hidden [T, H], weight [V, H] (or a rank's rows), targets [T]; `selected` [n] are the trained positions."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    selected: Tensor
    token_weights: Tensor
    """[n], in the loss."""
    chunk_size: int
    entropy_gradient: bool


Statistics = tuple[Tensor, Tensor]
"""Log-probabilities and entropies [n] of the trained positions."""


def make_problem(options: argparse.Namespace, rank: int, world: int, entropy_gradient: bool) -> Problem:
    """The same numbers in every process; a rank of several gets its rows of the weight."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    hidden = torch.randn(options.tokens, options.hidden)
    weight = torch.randn(options.vocabulary, options.hidden) * 2 / options.hidden**0.5
    targets = torch.randint(0, options.vocabulary, (options.tokens,))
    selected = torch.randperm(options.tokens)[: max(1, round(options.tokens * options.trained))].sort().values
    return Problem(
        hidden=hidden.to(device).requires_grad_(),
        weight=weight.chunk(world)[rank].clone().to(device).requires_grad_(),
        targets=targets.to(device),
        selected=selected.to(device),
        token_weights=torch.randn(len(selected)).to(device),
        chunk_size=options.chunk_size,
        entropy_gradient=entropy_gradient,
    )


def plain_statistics(hidden: Tensor, weight: Tensor, targets: Tensor, entropy_gradient: bool) -> Statistics:
    log_p = torch.log_softmax((hidden @ weight.t()).float(), -1)
    chosen = log_p.gather(1, targets[:, None]).squeeze(1)
    with torch.set_grad_enabled(entropy_gradient):
        entropy = -(log_p.exp() * log_p).sum(1)
    return chosen, entropy


def reference(problem: Problem) -> Statistics:
    found = plain_statistics(problem.hidden, problem.weight, problem.targets, problem.entropy_gradient)
    return found[0][problem.selected], found[1][problem.selected]


def reference_of_trained(problem: Problem) -> Statistics:
    selected = problem.selected
    return plain_statistics(
        problem.hidden[selected], problem.weight, problem.targets[selected], problem.entropy_gradient
    )


def ours(problem: Problem) -> Statistics:
    from sleuth.megatron.logprobs import HeadOptions, token_statistics

    options = HeadOptions(chunk_size=problem.chunk_size, entropy=True, entropy_gradient=problem.entropy_gradient)
    hidden, targets = problem.hidden[problem.selected], problem.targets[problem.selected]
    found = token_statistics(hidden, problem.weight, targets, options, dist.group.WORLD)
    return found[:, 0], found[:, 1]


FORMULATIONS: dict[str, tuple[Callable[[Problem], Statistics], int]] = {
    "reference": (reference, 1),
    "reference, trained": (reference_of_trained, 1),
    "ours": (ours, 1),
    "ours, tp2": (ours, 2),
}
"""Name -> (function, processes)."""


class Peak:
    """Peak memory of this process, in bytes above what it held when this was made."""

    def __init__(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self._start = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
            self._start = _resident("VmRSS")

    def bytes(self) -> int:
        return (torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _resident("VmHWM")) - self._start


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def run_pass(function: Callable[[Problem], Statistics], problem: Problem) -> dict[str, Tensor]:
    """Forwards and backwards; what it found, gradients included."""
    problem.hidden.grad = problem.weight.grad = None
    log_probs, entropy = function(problem)
    ((log_probs + 0.01 * entropy) * problem.token_weights).sum().backward()
    assert problem.hidden.grad is not None
    assert problem.weight.grad is not None
    return {
        "log_probs": log_probs.detach(),
        "entropy": entropy.detach(),
        "hidden.grad": problem.hidden.grad,
        "weight.grad": problem.weight.grad,
    }


def worker(rank: int, name: str, options: argparse.Namespace, entropy_gradient: bool, folder: str, port: int) -> None:
    function, world = FORMULATIONS[name]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(options.threads)
    import sleuth.megatron  # noqa: F401  megatron and its imports must not count

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    small = argparse.Namespace(**vars(options) | {"tokens": 64, "vocabulary": 1024})
    run_pass(function, make_problem(small, rank, world, entropy_gradient))
    problem = make_problem(options, rank, world, entropy_gradient)
    peak, seconds = Peak(), []
    for _ in range(options.trials):
        start = time.perf_counter()
        found = run_pass(function, problem)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    measured = {"peak": peak.bytes(), "seconds": median(seconds)}
    torch.save(found | measured, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def measure(name: str, options: argparse.Namespace, entropy_gradient: bool) -> dict[str, Any]:
    """What `worker` found; with several processes, the gradients as one process would have them, the largest peak."""
    world = FORMULATIONS[name][1]
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (name, options, entropy_gradient, folder, port), nprocs=world)
        parts = [torch.load(Path(folder) / f"{rank}.pt", map_location="cpu") for rank in range(world)]
    return parts[0] | {
        "hidden.grad": sum(part["hidden.grad"] for part in parts),
        "weight.grad": torch.cat([part["weight.grad"] for part in parts]),
        "peak": max(part["peak"] for part in parts),
    }


def largest_difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Of all results, relative to the largest entry of each."""
    names = ("log_probs", "entropy", "hidden.grad", "weight.grad")
    return max(float((found[n] - expected[n]).abs().max() / expected[n].abs().max()) for n in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=whole_number(), default=2048, help="positions of a micro-batch [2048]")
    parser.add_argument("--trained", type=positive(1), default=0.5, help="share of positions with a loss [0.5]")
    parser.add_argument(
        "--vocabulary", type=whole_number(2), default=151_936, help="words of the vocabulary [151936, Qwen's]"
    )
    parser.add_argument("--hidden", type=whole_number(), default=256, help="hidden size [256]")
    parser.add_argument(
        "--chunk-size", type=whole_number(), default=512, help="tokens of a chunk, as --log-probs-chunk-size [512]"
    )
    parser.add_argument("--trials", type=whole_number(), default=3, help="passes of each formulation [3]")
    parser.add_argument("--threads", type=whole_number(), default=1, help="threads of each process [1]")
    options = parser.parse_args()

    print(f"{'':26}{'peak MiB':>10}{'ratio':>8}{'seconds':>10}{'ratio':>8}{'difference':>12}")
    ratios: dict[str, dict[str, float]] = {}
    for entropy_gradient in (False, True):
        print("entropy with a gradient" if entropy_gradient else "entropy as a metric")
        expected: dict[str, Any] = {}
        for name in FORMULATIONS:
            found = measure(name, options, entropy_gradient)
            expected = expected or found
            memory = found["peak"] / max(expected["peak"], 4096)  # less than a page cannot be told from nothing
            speed = found["seconds"] / expected["seconds"]
            difference = largest_difference(found, expected)
            if difference > TOLERANCE:
                raise SystemExit(f"{name}: results differ from the reference's by {difference:.1e}; expected rounding")
            print(
                f"  {name:24}{found['peak'] / 2**20:10.0f}{memory:8.3f}{found['seconds']:10.3f}{speed:8.3f}"
                f"{difference:12.1e}"
            )
            key = f"{name}{', entropy gradient' if entropy_gradient else ''}"
            ratios[key] = {"memory": round(memory, 4), "time": round(speed, 4)}
    print(
        json.dumps(
            {
                "name": "head_memory: peak memory of log-probabilities and entropies, ours / plain",
                "ratio": ratios["ours"]["memory"],
                "time_ratio": ratios["ours"]["time"],
                "ratios": ratios,
            }
        )
    )


if __name__ == "__main__":
    main()
