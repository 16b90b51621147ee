"""The plan of the engine's attention on a CPU: every query gets all its keys, no other, and padding stays small."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from sleuth.engine import attention_plan
from sleuth.engine.attention_plan import FREE_KEYS, MOST_PAIRS, PADDING, Batch, Piece, cut, join

LENGTHS = [
    ([1] * 40, [random.Random(0).randrange(1, 3000) for _ in range(40)]),  # decoding
    ([9, 1, 300, 40, 41, 39], [9, 700, 300, 41, 250, 90]),  # prompts, new and continued
    ([5], [5]),
]


def attend(batch: Batch, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    b, _, e, s = batch.mask.shape
    key, value = (x[batch.slots].view(b, 1, s, -1) for x in (keys, values))
    return F.scaled_dot_product_attention(
        queries[batch.queries].view(b, 1, e, -1), key, value, attn_mask=batch.mask
    ).view(b * e, -1)


@pytest.mark.parametrize("most_pairs", [MOST_PAIRS, 1000])
@pytest.mark.parametrize(("new", "total"), LENGTHS)
def test_every_query_sees_the_keys_up_to_its_own(
    new: list[int], total: list[int], most_pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside attention that is computed for each request alone. Tolerance 1e-5: sums in another order."""
    monkeypatch.setattr(attention_plan, "MOST_PAIRS", most_pairs)
    torch.manual_seed(0)
    size, rows = sum(total), list(range(len(new)))
    random.Random(1).shuffle(rows)  # requests do not lie in the order of their rows
    slots = torch.zeros(len(new), max(total), dtype=torch.int32)
    places = torch.randperm(size, dtype=torch.int32).split(total)
    for row, place in zip(rows, places, strict=True):
        slots[row, : len(place)] = place
    queries, keys, values = torch.randn(sum(new), 8), torch.randn(size, 8), torch.randn(size, 8)

    found = torch.full_like(queries, torch.nan)
    for pieces in join(cut(new, total)):
        batch = Batch.of(pieces, slots, torch.tensor(rows), torch.float32)
        kept = torch.arange(len(batch.queries)) if batch.real is None else batch.real
        found[batch.queries[kept]] = attend(batch, queries, keys, values)[kept]

    start = 0
    for place, count in zip(places, new, strict=True):
        own = place.long()
        ones = torch.ones(count, len(own), dtype=torch.bool).tril(len(own) - count)
        expected = F.scaled_dot_product_attention(
            queries[None, start : start + count], keys[None, own], values[None, own], attn_mask=ones
        )
        torch.testing.assert_close(found[start : start + count], expected[0], atol=1e-5, rtol=0)
        start += count


def test_a_long_prompt_is_cut() -> None:
    pieces = cut([3, 10_000], [3, 12_000])
    assert pieces[0] == Piece(0, 0, 3, 3)
    assert all(piece.queries * piece.keys <= MOST_PAIRS for piece in pieces)
    assert [piece.start for piece in pieces[1:]] == [3 + 349 * i for i in range(len(pieces) - 1)]
    assert pieces[-1].keys == 12_000
    assert sum(piece.queries for piece in pieces) == 10_003


def test_one_long_request_does_not_make_short_ones_long() -> None:
    batches = join(cut([1] * 65, [30_000] + [100] * 64))
    assert [[len(batch), batch[0].keys] for batch in batches] == [[1, 30_000], [64, 100]]
    assert len(join(cut([1] * 8, [60, 70, 80, 90, 100, 110, 120, 300]))) == 1


@pytest.mark.parametrize("seed", range(20))
def test_padding_is_bounded(seed: int) -> None:
    rng = random.Random(seed)
    total = [int(10 ** rng.uniform(0, 4.2)) for _ in range(rng.randrange(1, 200))]
    batches = join(cut([1] * len(total), total))
    assert sorted(piece.request for batch in batches for piece in batch) == list(range(len(total)))
    for batch in batches:
        needed = sum(piece.keys for piece in batch)
        padding = len(batch) * max(piece.keys for piece in batch) - needed
        assert padding <= max(FREE_KEYS, PADDING * needed)
