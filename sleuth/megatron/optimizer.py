"""Megatron's Adam with our learning-rate schedule, its metrics, and repairs to its state.

Norms and biases have no weight decay. Where neither TransformerEngine nor Apex is installed, megatron uses torch's
AdamW, whose state must exist before it can be saved or loaded. Torch counts steps for each parameter, the others for
each group of them. After loading, the count is set anew, so that a checkpoint of either loads into the other; and under
the distributed optimizer all parameters would share one count, which AdamW would advance once for each of them. On a
GPU AdamW's fused kernel is used, which takes no memory of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    clip_grads,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import local_multi_tensor_l2_norm

from sleuth.megatron.device import local_device
from sleuth.megatron.model import resolve_dtype


class ScheduleSettings(Protocol):
    """The arguments that set the learning rate over optimizer steps."""

    lr: float
    min_lr: float
    lr_warmup_steps: int
    lr_decay_steps: int

    @property
    def lr_decay_style(self) -> str: ...


class OptimizerSettings(ScheduleSettings, Protocol):
    """The arguments that Adam needs."""

    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    clip_grad: float
    use_distributed_optimizer: bool
    overlap_param_gather: bool

    @property
    def dtype(self) -> str: ...


def learning_rate(args: ScheduleSettings, step: int) -> float:
    """The learning rate of optimizer step `step` (0, 1, ...).

    It rises linearly over --lr-warmup-steps (it is above 0 at the first step already), then stays, or falls to
    --min-lr at --lr-decay-steps by a straight line or half a cosine.
    """
    if step < args.lr_warmup_steps:
        return args.lr * (step + 1) / args.lr_warmup_steps
    if args.lr_decay_style == "constant":
        return args.lr
    span = max(1, args.lr_decay_steps - args.lr_warmup_steps)
    progress = min(1.0, (step - args.lr_warmup_steps) / span)
    remaining = 1.0 - progress if args.lr_decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return args.min_lr + (args.lr - args.min_lr) * remaining


class StepResult(NamedTuple):
    """The results of one optimizer step: the gradient's norm before clipping, and the learning rate."""

    grad_norm: float
    lr: float


class PolicyOptimizer:
    """Adam over this rank's share of the model. `steps_done` counts optimizer steps of the whole run."""

    def __init__(self, args: OptimizerSettings, chunks: Sequence[DistributedDataParallel]) -> None:
        self.args = args
        self.steps_done = 0
        _keep_step_when_loading()
        _keep_norm_on_device()
        _keep_padding_of_buckets()
        dtype = resolve_dtype(args.dtype)
        config = OptimizerConfig(
            optimizer="adam",
            lr=args.lr,
            min_lr=args.min_lr,
            weight_decay=args.weight_decay,
            adam_beta1=args.adam_beta1,
            adam_beta2=args.adam_beta2,
            adam_eps=args.adam_eps,
            # With an infinite bound megatron never clips, but still computes the norm; with 0 it would not.
            clip_grad=args.clip_grad or math.inf,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=args.use_distributed_optimizer,
            overlap_param_gather=args.overlap_param_gather,
        )
        self.inner: MegatronOptimizer = get_megatron_optimizer(
            config, list(chunks), config_overrides=get_standard_config_overrides(config)
        )
        self._create_state()

    @property
    def distributed(self) -> bool:
        """Whether each data-parallel rank keeps only its share of the state."""
        return self.args.use_distributed_optimizer

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def step(self) -> StepResult:
        """Clip the gradient, update the weights, advance the schedule. FloatingPointError if it is not finite."""
        lr = learning_rate(self.args, self.steps_done)
        self._apply_settings(lr)
        _, grad_norm, _ = self.inner.step()
        grad_norm = float(grad_norm)
        if not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"the gradient's norm is {grad_norm} in optimizer step {self.steps_done}; the weights are spoilt, "
                "go on from the last checkpoint (--load) with a lower --lr or --clip-grad"
            )
        self.steps_done += 1
        return StepResult(grad_norm, lr)

    def _apply_settings(self, lr: float) -> None:
        """Set whatever a user can set of Adam: a loaded state brings along the values that it was saved with."""
        for group in self.inner.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self.args.weight_decay * group["wd_mult"]
            group["betas"] = (self.args.adam_beta1, self.args.adam_beta2)
            group["eps"] = self.args.adam_eps
            group["fused"] = self._fused or None  # in whose place "foreach" would take a copy of a moment's size

    def sharded_state_dict(self, model_state: dict[str, Any], *, loading: bool, metadata: dict[str, Any]) -> Any:
        """Megatron's description of the optimizer's state for saving, or for loading into."""
        return self.inner.sharded_state_dict(model_state, is_loading=loading, metadata=metadata)

    def load_state_dict(self, state: Any, steps_done: int) -> None:
        """Go on from a saved state, whose moments and step count hold; the settings are those of `args`."""
        self._set_saved_step(state, steps_done)
        self.inner.load_state_dict(state)
        self._set_step(steps_done)
        self.steps_done = steps_done
        self._apply_settings(learning_rate(self.args, steps_done))

    def tensors(self) -> Iterator[torch.Tensor]:
        """What lies on the device: Adam's parameters (of bfloat16 weights a float32 copy) and its moments."""
        for optimizer in self._torch_optimizers():
            held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
            held += [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
            yield from (tensor for tensor in held if tensor.device == local_device())

    def _torch_optimizers(self) -> list[torch.optim.Optimizer]:
        chained = getattr(self.inner, "chained_optimizers", [self.inner])
        return [optimizer.optimizer for optimizer in chained if optimizer.optimizer is not None]

    @property
    def _fused(self) -> bool:
        return local_device().type == "cuda"

    @property
    def _step_device(self) -> torch.device:
        """The fused kernel reads AdamW's step count on the device; else the host does."""
        return local_device() if self._fused else torch.device("cpu")

    def _create_state(self) -> None:
        for optimizer in self._torch_optimizers():
            if not isinstance(optimizer, torch.optim.Adam):
                continue  # TransformerEngine's and Apex's create their own
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    optimizer.state[parameter] = {
                        "step": torch.tensor(0.0, device=self._step_device),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }

    def _set_saved_step(self, state: Any, steps_done: int) -> None:
        """Give a loaded state the step count where this Adam, through megatron, looks for it."""
        if not isinstance(state, dict):
            return
        for group in state.get("param_groups", ()):
            group["step"] = steps_done
        if "param_groups" in state and state.get("state"):  # by parameter, but for megatron's entry
            state["state"].pop("common_step", None)
            if all(isinstance(optimizer, torch.optim.Adam) for optimizer in self._torch_optimizers()):
                state["state"]["common_step"] = torch.tensor(float(steps_done))
        for value in state.values():
            self._set_saved_step(value, steps_done)

    def _set_step(self, steps_done: int) -> None:
        """Set Adam's step count where this Adam has it; the one that saved may have had it elsewhere."""
        for optimizer in self._torch_optimizers():
            torchs_own = isinstance(optimizer, torch.optim.Adam)
            for group in optimizer.param_groups:
                if torchs_own:
                    group.pop("step", None)
                else:
                    group["step"] = steps_done
                for parameter in group["params"]:
                    state = optimizer.state.get(parameter, {})
                    if torchs_own:
                        state["step"] = torch.tensor(float(steps_done), device=self._step_device)
                    else:
                        state.pop("step", None)


@functools.cache
def _keep_norm_on_device() -> None:
    """Compute the gradient's norm in one go: megatron's stand-in for Apex's kernel waits for every parameter's."""
    if clip_grads.l2_norm_impl is not local_multi_tensor_l2_norm:
        return  # Apex's or TransformerEngine's kernel is there

    def l2_norm(chunk: int, overflow: Any, tensors: list[list[torch.Tensor]], *args: Any) -> tuple[torch.Tensor, None]:
        return torch.nn.utils.get_total_norm(tensors[0]).view(1), None

    clip_grads.l2_norm_impl = l2_norm


@functools.cache
def _keep_step_when_loading() -> None:
    """Inside the block, let the distributed optimizer load AdamW's state.

    It asks the saved tensors of a parameter for `step`, which is saved elsewhere and already restored, and it copies
    into leaf tensors that need gradients.
    """
    load = DistributedOptimizer._set_main_param_and_optimizer_states

    @torch.no_grad()
    def load_with_step(self: DistributedOptimizer, model_param: torch.nn.Parameter, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        load(self, model_param, {**tensors, "step": state["step"]} if "step" in state else tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = load_with_step


@functools.cache
def _keep_padding_of_buckets() -> None:
    """Let a checkpoint find each parameter's state where several buckets are padded (--overlap-grad-reduce).

    The distributed optimizer gathers the state of a buffer without the padding between its buckets, and then cuts it
    by positions that count the padding: parameters after it would be saved with those of their neighbours.
    """
    gather = DistributedOptimizer.get_parameter_state_dp_zero

    def gather_padded(self: DistributedOptimizer, *args: Any, **kwargs: Any) -> Any:
        state = gather(self, *args, **kwargs)
        for number, buffer in enumerate(self.buffers if state else ()):
            for tensors in state[number].values():
                tensors |= {key: _padded(value, buffer) for key, value in tensors.items() if torch.is_tensor(value)}
        return state

    DistributedOptimizer.get_parameter_state_dp_zero = gather_padded


def _padded(joined: torch.Tensor, buffer: Any) -> torch.Tensor:
    """[buffer.numel] from [buffer.numel_unpadded]: the buckets of a buffer, each at its place."""
    if len(buffer.buckets) == 1:
        return joined
    padded, start = joined.new_zeros(buffer.numel), 0
    for bucket in buffer.buckets:
        size = bucket.numel_unpadded
        padded[bucket.offset : bucket.offset + size] = joined[start : start + size]
        start += size
    return padded
