"""The head and the packed attention against plain torch, values and gradients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType

from sleuth.megatron import logprobs
from sleuth.megatron.attention import PackedAttention, PackedRow, rotary_angles, rotary_frequencies
from sleuth.megatron.logprobs import HeadOptions, token_statistics


class OneRank:
    """A process group of one."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("chunk", [3, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_head_agrees_with_log_softmax(
    keep: bool, chunk: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not keep:
        monkeypatch.setattr(logprobs, "_KEEP_BYTES", 0)
    monkeypatch.setattr(logprobs, "_CPU_BLOCK", 50)  # two rows of 20 words
    torch.manual_seed(0)
    hidden, weight = torch.randn(11, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    targets, upstream = torch.randint(0, 20, (11,)), torch.randn(11, 3)

    log_p = torch.log_softmax(hidden @ weight.t() / temperature, 1)
    chosen = log_p.gather(1, targets[:, None]).squeeze(1)
    expected = torch.stack([chosen, -(log_p.exp() * log_p).sum(1), log_p.mean(1)], 1)
    gradients = torch.autograd.grad((expected * upstream).sum(), (hidden, weight))

    options = HeadOptions(temperature, chunk, entropy=True, entropy_gradient=True, mean=True)
    found = token_statistics(hidden, weight, targets, options, OneRank())
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(torch.autograd.grad((found * upstream).sum(), (hidden, weight)), gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_backward_twice_gives_the_same_gradients() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    found = token_statistics(hidden, weight, torch.arange(5), HeadOptions(entropy=True), OneRank())
    first, second = (torch.autograd.grad(found.sum(), (hidden, weight), retain_graph=True) for _ in range(2))
    torch.testing.assert_close(first, second)


def test_statistics_are_exact_for_near_certain_and_for_huge_logits() -> None:
    for scale in (1e-3, 1.0, 1e3):
        torch.manual_seed(0)
        hidden, weight = torch.randn(6, 8) * scale, torch.randn(50, 8)
        targets = torch.randint(0, 50, (6,))
        log_p = torch.log_softmax((hidden @ weight.t()).double(), 1)
        chosen = log_p.gather(1, targets[:, None]).squeeze(1)
        entropy = -(log_p.exp() * log_p).sum(1)
        found = token_statistics(hidden, weight, targets, HeadOptions(entropy=True), OneRank())
        torch.testing.assert_close(found[:, 0].double(), chosen, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found[:, 1].double(), entropy, rtol=1e-6, atol=1e-6)


def test_head_without_tokens_has_zero_gradients() -> None:
    hidden, weight = torch.randn(0, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    found = token_statistics(hidden, weight, torch.zeros(0, dtype=torch.long), HeadOptions(entropy=True), OneRank())
    found.sum().backward()
    assert found.shape == (0, 3)
    assert weight.grad is not None
    assert not weight.grad.any()


def test_entropy_has_a_gradient_only_where_asked_for() -> None:
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(20, 8)
    found = token_statistics(hidden, weight, torch.arange(4), HeadOptions(entropy=True), OneRank())
    found[:, 1].sum().backward()
    assert hidden.grad is not None
    assert not hidden.grad.any()


@pytest.mark.parametrize("lengths", [[7], [5, 5, 5], [3, 9, 1, 4, 8, 8], [40, 1, 2]])
def test_packed_attention_is_causal_within_each_sequence(lengths: list[int]) -> None:
    torch.manual_seed(0)
    total, heads, groups, width = sum(lengths), 4, 2, 8
    query = torch.randn(total, heads, width, requires_grad=True)
    key, value = (torch.randn(total, groups, width, requires_grad=True) for _ in range(2))
    upstream = torch.randn(total, heads * width)
    pieces = []
    for q, k, v in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        pieces.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1))
    expected = torch.cat(pieces).flatten(1)
    gradients = torch.autograd.grad((expected * upstream).sum(), (query, key, value))

    config = SimpleNamespace(attention_dropout=0.0)
    attention = PackedAttention(config, 1, AttnMaskType.causal, pg_collection=SimpleNamespace(cp=OneRank()))
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
    params = PackedRow.of(lengths, bounds, 1)
    found = attention(query, key, value, packed_seq_params=params)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(torch.autograd.grad((found * upstream).sum(), (query, key, value)), gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_rotation_agrees_with_transformers() -> None:
    from transformers import Qwen2Config
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding, apply_rotary_pos_emb

    torch.manual_seed(0)
    config = Qwen2Config(hidden_size=32, num_attention_heads=4, num_key_value_heads=2)
    lengths, width = [5, 3], 8
    positions = torch.cat([torch.arange(length) for length in lengths])
    query, key, value = (torch.randn(8, heads, width, requires_grad=True) for heads in (4, 2, 2))
    cos, sin = Qwen2RotaryEmbedding(config)(query, positions[None])
    rotated = apply_rotary_pos_emb(query[None], key[None], cos, sin, unsqueeze_dim=2)

    attention = PackedAttention(
        SimpleNamespace(attention_dropout=0.0), 1, AttnMaskType.causal, pg_collection=SimpleNamespace(cp=OneRank())
    )
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
    plain = PackedRow.of(lengths, bounds, 1)
    angles = rotary_angles(positions, rotary_frequencies(width, config.rope_parameters["rope_theta"]), torch.float32)
    expected = attention(rotated[0][0], rotated[1][0], value, packed_seq_params=plain)
    found = attention(query, key, value, packed_seq_params=PackedRow(**vars(plain) | {"rotary": angles}))
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(found)
    gradients = [torch.autograd.grad(x, (query, key, value), upstream, retain_graph=True) for x in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_attention_dropout_is_refused() -> None:
    with pytest.raises(ValueError, match="--attention-dropout"):
        PackedAttention(SimpleNamespace(attention_dropout=0.1), 1, AttnMaskType.causal)
