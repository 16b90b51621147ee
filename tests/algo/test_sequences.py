"""Sums over sequences, whole and spread over context-parallel ranks."""

import numpy as np
import torch

from sleuth.algo.context_parallel import zigzag_index
from sleuth.algo.sequences import sample_mean_weights, sequence_means, sequence_sums

LENGTHS = [8, 4, 12]
IDS = torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))


def over_ranks(function, *tensors):
    """Run `function(*parts, reduce)` for both ranks of a context-parallel pair, as if in step, and return both."""
    parts = [[t[zigzag_index(LENGTHS, 2, rank)] for t in tensors] for rank in range(2)]
    sums = []
    for part in parts:
        function(*part, lambda local: sums.append(local.clone()) or local)
    return [function(*part, lambda local: sum(sums)) for part in parts]


def test_sums_equal_numpy():
    values = torch.randn(2, 24, dtype=torch.float64, requires_grad=True)
    found = sequence_sums(values, IDS, 3)
    expected = [[row[IDS.numpy() == s].sum() for s in range(3)] for row in values.detach().numpy()]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)
    assert not found.requires_grad


def test_means_equal_numpy_and_ignore_masked_values():
    mask = torch.rand(24, generator=torch.Generator().manual_seed(0)) > 0.4
    mask[8:12] = False
    values = torch.randn(24, dtype=torch.float64)
    poisoned = values.masked_fill(~mask, float("nan"))
    owned = [mask & (s == IDS) for s in range(3)]
    expected = [values[tokens].mean().item() if tokens.any() else 0.0 for tokens in owned]
    np.testing.assert_allclose(sequence_means(poisoned, mask, IDS, 3).numpy(), expected, rtol=1e-12)


def test_means_do_not_depend_on_context_parallelism():
    values, mask = torch.randn(24, dtype=torch.float64), torch.rand(24) > 0.3
    whole = sequence_means(values, mask, IDS, 3)
    for part in over_ranks(lambda v, m, i, reduce: sequence_means(v, m, i, 3, reduce), values, mask, IDS):
        torch.testing.assert_close(part, whole)


def test_sample_mean_weights_add_up_to_one():
    mask = torch.tensor([0.0] * 3 + [1.0] * 5 + [0.0] * 4 + [0.5] * 12)
    weights = sample_mean_weights(mask, IDS, 3)
    torch.testing.assert_close(sequence_sums(weights, IDS, 3), torch.tensor([1.0, 0.0, 1.0]))
    assert (weights[mask == 0] == 0).all()


def test_sample_mean_weights_do_not_depend_on_context_parallelism():
    mask = (torch.rand(24) > 0.5).double()
    whole = sample_mean_weights(mask, IDS, 3)
    parts = over_ranks(lambda m, i, reduce: sample_mean_weights(m, i, 3, reduce), mask, IDS)
    for rank, part in enumerate(parts):
        torch.testing.assert_close(part, whole[zigzag_index(LENGTHS, 2, rank)])
