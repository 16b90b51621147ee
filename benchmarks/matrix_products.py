"""What bfloat16 gains on this CPU: speed of the matrix products of a model's layers, forwards and backwards.

    python -m benchmarks.matrix_products [--model smollm2-135M] [--rows 32 64 1024]

The shapes are those of a file of scripts/models/. Rows are tokens computed together: requests of a decode step, or
tokens of a training row. One thread; the processor time of all layers, which holds where other work keeps the machine
busy. Backwards are the two products of a layer's gradients. The last line is one JSON
object; its ratio is the time in float32 over that in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.options import whole_number
from sleuth.arguments.model_scripts import FOLDER, known_models, read_model_script

COPIES = 4
"""Weights of so many layers are used in turn, so that they do not stay in the processor's cache."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=known_models(), default="smollm2-135M", help="[smollm2-135M]")
    parser.add_argument("--rows", type=whole_number(), nargs="+", default=[32, 64, 1024], help="[32 64 1024]")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = read_model_script(FOLDER / f"{options.model}.sh").shape
    totals = {torch.float32: 0.0, torch.bfloat16: 0.0}
    for rows in options.rows:
        for dtype in totals:
            forward, backward = (measure(shape, rows, dtype, back) for back in (False, True))
            name = str(dtype).removeprefix("torch.")
            print(f"{rows:>6} rows, {name:8}: forwards {forward:6.0f} ms, backwards {backward:6.0f} ms")
            totals[dtype] += forward + backward
    reference, ours = totals.values()
    result = {"name": "matrix_products", "ours": ours, "reference": reference, "ratio": reference / ours}
    print(json.dumps(result))


def layer_shapes(shape: dict[str, int]) -> list[tuple[int, int]]:
    """(outputs, inputs) of the four matrices of a layer: attention's two, and the feed-forward network's two."""
    width, heads = shape["hidden_size"], shape["num_attention_heads"] + 2 * shape["num_query_groups"]
    inner, feed = shape["num_attention_heads"] * shape["kv_channels"], shape["ffn_hidden_size"]
    return [(heads * shape["kv_channels"], width), (width, inner), (2 * feed, width), (width, feed)]


def measure(shape: dict[str, int], rows: int, dtype: torch.dtype, backward: bool) -> float:
    """Processor milliseconds of all layers."""
    total = 0.0
    for outputs, inputs in layer_shapes(shape):
        weights = [torch.randn(outputs, inputs, dtype=dtype) for _ in range(COPIES)]
        x, gradient = torch.randn(rows, inputs, dtype=dtype), torch.randn(rows, outputs, dtype=dtype)
        total += processor_seconds(partial(backwards if backward else forwards, x, gradient), weights)
    return 1000 * total * shape["num_layers"]


def forwards(x: Tensor, gradient: Tensor, weight: Tensor) -> object:
    return x @ weight.T


def backwards(x: Tensor, gradient: Tensor, weight: Tensor) -> object:
    return gradient @ weight, gradient.T @ x


def processor_seconds(product: Callable[[Tensor], object], weights: list[Tensor]) -> float:
    """Of one product, after a first round that warms up."""
    for weight in weights:
        product(weight)
    start = time.process_time()
    for weight in weights:
        product(weight)
    return (time.process_time() - start) / len(weights)


if __name__ == "__main__":
    main()
