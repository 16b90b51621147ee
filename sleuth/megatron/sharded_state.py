"""The sharded state of a model, and reading a torch_dist checkpoint into it, whoever wrote that.

TransformerEngine's layers have the same tensors under the same names as ours, and extra states besides, which hold
nothing without fp8: they are saved, but neither asked of a checkpoint nor read.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from sleuth.megatron.model import PolicyModel
from sleuth.megatron.stored_metadata import restricted

UNREADABLE = (
    CheckpointingException,
    CheckpointException,  # no Exception
    pickle.UnpicklingError,
    json.JSONDecodeError,
    EOFError,
    KeyError,
    OSError,
    RuntimeError,
)
"""What megatron and torch raise for a checkpoint whose files are missing, cut short or damaged."""

_EXTRA_STATE = "._extra_state"
_OLDER_NAME = ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
"""The name of a norm, and what it was called in the first checkpoints of mixtures of experts."""


def sharding_metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def model_state(chunks: Sequence[PolicyModel], metadata: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The sharded state of each chunk. Tensors have their names in the whole model, however it is cut into chunks."""
    return {f"model{index}": chunk.sharded_state_dict(metadata=metadata) for index, chunk in enumerate(chunks)}


def load_chunks(chunks: Sequence[PolicyModel], state: dict[str, Any]) -> None:
    for index, chunk in enumerate(chunks):
        missing, unexpected = chunk.load_state_dict(state[f"model{index}"], strict=False)
        wrong = [name for name in missing if not name.endswith(_EXTRA_STATE)] + unexpected
        assert not wrong, f"the checkpoint was read for another model: {wrong}"


def _without_extra_state(state: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The state without the fp8 entries of TransformerEngine's modules, which not every checkpoint has."""
    return {
        chunk: {name: value for name, value in parts.items() if not name.endswith(_EXTRA_STATE)}
        for chunk, parts in state.items()
    }


def loadable_state(chunks: Sequence[PolicyModel], metadata: dict[str, Any], found: Path) -> dict[str, dict[str, Any]]:
    """The state of each chunk to load from the checkpoint `found`. ValueError if it is of another model."""
    state = _without_extra_state(model_state(chunks, metadata))
    for chunk in state.values():
        match_stored(chunk, found)
    return state


def read_into(state: dict[str, Any], found: Path) -> None:
    """Read the checkpoint `found` into `state`; ValueError if it cannot be read or does not fit."""
    with readable(found):
        state.update(dist_checkpointing.load(state, str(found)))


@contextmanager
def readable(found: Path) -> Iterator[None]:
    """Inside the block, the checkpoint `found` is read; what fails is a ValueError that names it. Runs no pickled code.

    The caller has looked at its `.metadata` (`check_checkpoint`).
    """
    try:
        with restricted():
            yield
    except UNREADABLE as error:
        raise ValueError(
            f"the checkpoint in {found} cannot be read into this model ({last_line(error)}); if its files are damaged "
            "or not all there, copy it again or name an earlier one, else give the flags with which it was saved"
        ) from error


def last_line(error: BaseException) -> str:
    """The end of an error's message, where torch and megatron state the cause."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


def match_stored(chunk: dict[str, Any], found: Path) -> None:
    """Give the tensors of a model's sharded state the names that they have in the checkpoint.

    Raises ValueError, which names the tensor, if the checkpoint lacks one or holds it in another shape.
    """
    with readable(found):
        stored = dist_checkpointing.load_tensors_metadata(str(found))
    for wanted in chunk.values():
        if not isinstance(wanted, ShardedTensor):
            continue
        older = wanted.key.replace(*_OLDER_NAME)
        if wanted.key not in stored and older in stored:
            wanted.key = older
        if wanted.key not in stored:
            raise ValueError(f"expected tensor {wanted.key} in the checkpoint {found}, found {len(stored)} others")
        shape = tuple(stored[wanted.key].global_shape)
        if shape != tuple(wanted.global_shape):
            raise ValueError(
                f"tensor {wanted.key} of the checkpoint {found} has shape {list(shape)}, expected "
                f"{list(wanted.global_shape)} by the model's config.json; the checkpoint is of another model"
            )
