"""Writes and reads torch_dist checkpoints a few tensors at a time, so that the model need not fit into memory.

The model that describes the checkpoint is on the meta device: its parameters have shapes, but no values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed import checkpoint

from sleuth.megatron.model import PolicyModel
from sleuth.megatron.sharded_state import match_stored, readable

PIECE_BYTES = 200_000_000
"""How much is read from a checkpoint at once."""

Values = Callable[[torch.nn.Parameter], Tensor]
"""A parameter's value, of its shape."""


class StreamedSave(SaveShardedStrategy):
    """Writes the parameters of a meta model one after the other, and asks `values` for each when its turn comes.

    The files are the same as those of megatron's own strategy.
    """

    def __init__(self, chunks: Sequence[PolicyModel], values: Values) -> None:
        super().__init__("torch_dist", 1)
        parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        self._parameters = {_storage(parameter): parameter for parameter in parameters}
        self._values = values
        self._last: tuple[torch.nn.Parameter, Tensor] | None = None

    def can_handle_sharded_objects(self) -> bool:
        return True

    def save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> None:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        checkpoint.save(
            mcore_to_pyt_state_dict(by_key),
            storage_writer=checkpoint.FileSystemWriter(checkpoint_dir),
            planner=_StreamingPlanner(self._fill),
        )

    def _fill(self, part: Tensor) -> Tensor:
        """The values of one part of a parameter; a parameter may be stored in several parts."""
        parameter = self._parameters[_storage(part)]
        if self._last is None or self._last[0] is not parameter:
            self._last = None  # let go of it first
            self._last = parameter, self._values(parameter).to(parameter.dtype).contiguous()
        return self._last[1].flatten()[part.storage_offset() :][: part.numel()].view(part.shape)


class _StreamingPlanner(MCoreSavePlanner):
    def __init__(self, fill: Callable[[Tensor], Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self._fill = fill

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return self._fill(object) if isinstance(object, Tensor) else super().transform_object(write_item, object)


class StreamedLoad:
    """A callable that returns the values of a meta model's parameter in the checkpoint `found`, in its dtype.

    Ask for parameters in the model's order, because several are read at a time. Raises ValueError if the checkpoint is
    of another model or cannot be read.
    """

    def __init__(self, chunks: Sequence[PolicyModel], found: Path) -> None:
        self._found = found
        self._waiting: dict[int, tuple[torch.nn.Parameter, Any]] = {}
        self._read: dict[int, Tensor] = {}
        for chunk in chunks:
            state = chunk.sharded_state_dict()
            match_stored(state, found)
            self._waiting |= {id(p): (p, state[name]) for name, p in chunk.named_parameters()}

    def __call__(self, parameter: torch.nn.Parameter) -> Tensor:
        if id(parameter) not in self._read:
            self._read_from(parameter)
        return self._read.pop(id(parameter))

    def _read_from(self, parameter: torch.nn.Parameter) -> None:
        """Read this parameter and those after it, up to the size of one piece."""
        keys = list(self._waiting)
        wanted: list[ShardedTensor] = []
        size = 0
        for key in keys[keys.index(id(parameter)) :]:
            parameter, stored = self._waiting[key]
            if wanted and size + parameter.nbytes > PIECE_BYTES:
                break
            self._read[key] = torch.empty(parameter.shape, dtype=parameter.dtype)
            wanted += _parts(stored, self._read[key])
            size += parameter.nbytes
            del self._waiting[key]
        with readable(self._found):  # into the tensors that `wanted` shows
            named = {str(number): part for number, part in enumerate(wanted)}
            dist_checkpointing.load(named, self._found, validate_access_integrity=False)


def _parts(stored: ShardedTensor | ShardedTensorFactory, values: Tensor) -> list[ShardedTensor]:
    """The parts in which a checkpoint stores a parameter, as views of its `values`.

    A stored tensor may have the layer's number as an axis; megatron can read it only for all layers at once.
    """
    stored.data = values
    built = stored.build() if isinstance(stored, ShardedTensorFactory) else stored
    parts = [built] if isinstance(built, ShardedTensor) else list(nested_values(built))
    return [
        dataclasses.replace(
            part,
            data=part.data[(None,) * part.prepend_axis_num],
            local_shape=(1,) * part.prepend_axis_num + tuple(part.local_shape),
            prepend_axis_num=0,
        )
        for part in parts
    ]


def _storage(tensor: Tensor) -> int:
    """A key that all views of a tensor share, even of a tensor without values."""
    return int(tensor.untyped_storage()._cdata)
