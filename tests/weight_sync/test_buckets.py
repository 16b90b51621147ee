"""How tensors are cut into buckets."""

from __future__ import annotations

import pytest
import torch

from sleuth.weight_sync.buckets import flatten, make_buckets, mark_last

ONE = torch.ones(1)


def test_buckets_keep_order_and_size() -> None:
    tensors = [(str(i), torch.zeros(size, dtype=torch.uint8)) for i, size in enumerate([3, 3, 3, 20, 1, 9, 1])]
    buckets = [([name for name, _ in bucket], is_last) for bucket, is_last in mark_last(make_buckets(tensors, 10))]
    assert buckets == [(["0", "1", "2"], False), (["3"], False), (["4", "5"], False), (["6"], True)]


@pytest.mark.parametrize(("tensors", "size", "message"), [([], 1, "weights to send"), ([("a", ONE)], 0, "at least 1")])
def test_nothing_to_send_is_refused(tensors: list[tuple[str, torch.Tensor]], size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(make_buckets(tensors, size))


def test_a_flat_bucket_holds_every_byte_in_order() -> None:
    matrix = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    flat = flatten([("a", matrix.t()), ("b", torch.tensor([1.5], dtype=torch.bfloat16))])
    assert flat[:24].view(torch.float32).tolist() == [0, 3, 1, 4, 2, 5]
    assert flat[24:].view(torch.bfloat16).tolist() == [1.5]
    alone = flatten([("a", matrix)])
    assert alone.data_ptr() != matrix.data_ptr(), "the trainer may change its weights while a bucket is on its way"
