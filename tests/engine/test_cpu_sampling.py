"""The engine's sampling on a CPU draws tokens with the probabilities it is given."""

from __future__ import annotations

import pytest
import torch

from sleuth.engine.cpu_sampling import BLOCK, draw, draw_tokens

DRAWS, ROUNDS = 20_000, 5


@pytest.mark.parametrize("words", [3, BLOCK, 1000])
def test_tokens_have_their_probabilities(words: int) -> None:
    """A chi-square test: its statistic, standardised, is beyond 5 by chance once in two million."""
    torch.manual_seed(words)
    probs = torch.softmax(torch.randn(words) * 2, 0)
    probs[words // 2] = 0
    counts = sum(torch.bincount(draw(probs.expand(DRAWS, -1)), minlength=words) for _ in range(ROUNDS))
    assert counts[words // 2] == 0
    expected = probs.double() / probs.double().sum() * DRAWS * ROUNDS
    often = expected > 20
    statistic = ((counts - expected).square() / expected)[often].sum()
    freedom = int(often.sum())
    assert abs(statistic - freedom) / (2 * freedom) ** 0.5 < 5


@pytest.mark.parametrize("uniform", [0.0, 0.25, 1 - 2.0**-53])
def test_a_word_of_probability_zero_is_never_drawn(uniform: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda *size, **kw: torch.full(size, uniform, dtype=torch.float64))
    for possible in ([0], [5, 130], [299], [127, 128]):
        probs = torch.zeros(1, 300)
        probs[0, possible] = 0.1
        assert draw(probs).item() in possible


def test_a_rare_word_keeps_its_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    """1e-9 beside 1, which float32 cannot add: the number that is searched for decides, as far as float64 goes."""
    probs = torch.tensor([[0.5, 0.5, 1e-9, 0.0]])
    for uniform, word in ((0.49, 0), (0.51, 1), (1 - 2e-9, 1), (1 - 5e-10, 2)):
        monkeypatch.setattr(torch, "rand", lambda *s, u=uniform, **kw: torch.full(s, u, dtype=torch.float64))
        assert draw(probs).item() == word


def test_seeds_of_requests_are_left_to_the_server() -> None:
    probs, seed = torch.ones(2, 4) / 4, torch.tensor([1, 2])
    assert draw_tokens(lambda probs, seed: seed, probs, seed) is seed
    assert draw_tokens(lambda *args: pytest.fail("called"), probs).dtype == torch.int32
