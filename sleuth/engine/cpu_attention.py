"""Attention of SGLang's engine on a CPU, for many requests at once.

SGLang's `torch_native` backend computes one request after the other, a dozen small operators each in every layer, and
where the beginning of a prompt is cached it computes that part again. Here requests are computed in batches, only for
new tokens. What does not depend on the layer is worked out once for a forward pass (`attention_plan.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from sleuth.engine.attention_plan import Batch, cut, join


class BatchedAttention(TorchNativeAttnBackend):
    """Takes the place of `torch_native`. Layers with a sliding window or of an encoder are left to SGLang's own."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._dtype: torch.dtype = model_runner.dtype
        self._batches: list[Batch] = []
        self._space: dict[str, Tensor] = {}

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan the forward pass that comes."""
        super().init_forward_metadata(forward_batch)
        total = forward_batch.seq_lens.tolist()
        new = [1] * len(total) if forward_batch.forward_mode.is_decode() else forward_batch.extend_seq_lens.tolist()
        slots, requests = self.req_to_token_pool.req_to_token, forward_batch.req_pool_indices
        self._batches = [Batch.of(pieces, slots, requests, self._dtype) for pieces in join(cut(new, total))]

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        """Attention [tokens, heads * d] of new tokens q [tokens, heads * d], after their k and v are in the cache."""
        if _is_special(layer, forward_batch):
            out: Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
            return out
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        """As `forward_extend`, of one new token for each request."""
        if _is_special(layer, forward_batch):
            out: Tensor = super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
            return out
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool) -> Tensor:
        if save_kv_cache and k is not None and v is not None:
            where = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_empty(len(queries), layer.tp_q_head_num, layer.v_head_dim)
        for batch in self._batches:
            attended = self._attend(batch, queries, keys, values, layer.scaling)
            if batch.real is None:
                out.index_copy_(0, batch.queries, attended)
            else:
                out.index_copy_(0, batch.queries[batch.real], attended[batch.real])
        return out.flatten(1)

    def _attend(self, batch: Batch, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """[b * e, heads, d] of queries [tokens, heads, d] to the cache's keys and values [slots, kv heads, d]."""
        b, _, e, s = batch.mask.shape
        key, value = (
            self._fetch(name, cache, batch.slots).view(b, s, *cache.shape[1:]).transpose(1, 2).to(queries.dtype)
            for name, cache in (("key", keys), ("value", values))
        )
        query = queries.index_select(0, batch.queries)
        if e == 1:  # the query heads that share a key head are its queries: no copies of keys
            query = query.view(b, key.shape[1], -1, query.shape[-1])
            return F.scaled_dot_product_attention(query, key, value, attn_mask=batch.mask, scale=scale).flatten(1, 2)
        query = query.view(b, e, *query.shape[1:]).transpose(1, 2)
        grouped = query.shape[1] != key.shape[1]
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=batch.mask, scale=scale, enable_gqa=grouped
        )
        return attended.transpose(1, 2).flatten(0, 1)

    def _fetch(self, name: str, cache: Tensor, slots: Tensor) -> Tensor:
        """Rows of the cache, in memory that is kept: the system takes its time to give pages for a new copy."""
        space = self._space.get(name)
        if space is None or len(space) < len(slots) or space.shape[1:] != cache.shape[1:]:
            space = self._space[name] = cache.new_empty(len(slots) * 5 // 4, *cache.shape[1:])
        return torch.index_select(cache, 0, slots, out=space[: len(slots)])


def _is_special(layer: Any, forward_batch: Any) -> bool:
    window = layer.sliding_window_size
    return (
        layer.is_cross_attention
        or layer.attn_type == AttentionType.ENCODER_ONLY
        or forward_batch.encoder_lens is not None
        or (window is not None and window > -1)
    )
