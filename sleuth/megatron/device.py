"""The device layer: lets megatron-core run on a CPU with gloo. Where CUDA is available it does nothing.

Every module of megatron-core has a global named `torch`. `install` replaces that global, in megatron's
modules only, by a thin proxy whose `cuda` namespace and tensor factories use the CPU when they are asked for
"cuda"; everything else is passed on to the real torch. Three things cannot be reached that way and are
patched by name: the random-number tracker (bound at import), the optimizers' checks of `Tensor.type()`
strings (only during the calls that make them), and `Tensor.cuda()` (which returns the tensor itself).

`install` is called before any megatron module is used (`sleuth.megatron` does so when it is imported).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

_CPU = torch.device("cpu")
_FACTORIES = """
    zeros ones empty full tensor arange rand randn randint eye linspace as_tensor
    empty_like zeros_like ones_like full_like
"""
_CORE_MODULES = """
    distributed dist_checkpointing models.gpt models.gpt.gpt_layer_specs optimizer optimizer.clip_grads
    optimizer.distrib_optimizer optimizer.optimizer parallel_state pipeline_parallel tensor_parallel
    tensor_parallel.random transformer.moe.token_dispatcher
"""


def local_device() -> torch.device:
    """The device on which this process computes: its CUDA device, or the CPU if there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return _CPU


def distributed_backend() -> str:
    """The backend of torch.distributed for `local_device`."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


class _NullContext:
    """Stands in for CUDA streams, events and device guards: every method is a no-op."""

    def __getattr__(self, name: str) -> Callable[..., _NullContext]:
        return lambda *args, **kwargs: self

    def __call__(self, *args: Any, **kwargs: Any) -> _NullContext:
        return self

    def __enter__(self) -> _NullContext:
        return self

    def __exit__(self, *args: object) -> None:
        pass


_NULL = _NullContext()


class _CpuCuda(types.ModuleType):
    """`torch.cuda` as megatron's modules see it on a CPU."""

    @property
    def random(self) -> _CpuCuda:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        return _CPU

    def device_count(self) -> int:
        return 1

    def synchronize(self, *args: Any, **kwargs: Any) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def set_device(self, *args: Any) -> None:
        pass

    def current_stream(self, *args: Any) -> _NullContext:
        return _NULL

    default_stream = stream = device = current_stream

    def Stream(self, *args: Any, **kwargs: Any) -> _NullContext:
        return _NULL

    Event = Stream

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


def _on_cpu(device: Any) -> Any:
    """Map a CUDA device in any spelling to the CPU; return other devices unchanged."""
    is_cuda = (
        isinstance(device, int)
        or (isinstance(device, str) and device.startswith("cuda"))
        or (isinstance(device, torch.device) and device.type == "cuda")
    )
    return _CPU if is_cuda else device


def _cpu_factory(name: str) -> Callable[..., torch.Tensor]:
    real = getattr(torch, name)

    @functools.wraps(real)
    def factory(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return real(*args, **kwargs)

    return factory


class _CpuTorch(types.ModuleType):
    """`torch` as megatron's modules see it on a CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _CpuCuda("torch.cuda")
        for name in _FACTORIES.split():
            setattr(self, name, _cpu_factory(name))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_PROXY = _CpuTorch()


def _use_proxy(module: types.ModuleType) -> None:
    if getattr(module, "torch", None) is torch:
        module.torch = _PROXY  # type: ignore[attr-defined]


class _LateModules(importlib.abc.MetaPathFinder):
    """An import hook that gives the proxy to megatron modules which are imported after `install`."""

    def __init__(self) -> None:
        self._searching = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("megatron.core") or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            _use_proxy(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


@contextlib.contextmanager
def _cuda_type_names() -> Iterator[None]:
    """Inside the block, `Tensor.type()` returns "torch.cuda...", by which megatron's optimizers sort parameters."""
    real = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = real(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.") if isinstance(result, str) else result

    torch.Tensor.type = type_  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.Tensor.type = real  # type: ignore[method-assign]


def _with_cuda_type_names(owner: Any, name: str) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with _cuda_type_names():
            return function(*args, **kwargs)

    setattr(owner, name, wrapper)


def _patch_optimizers() -> None:
    from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer

    _with_cuda_type_names(optimizer.Float16OptimizerWithFloat16Params, "__init__")
    _with_cuda_type_names(distrib_optimizer.DistributedOptimizer, "__init__")
    _with_cuda_type_names(clip_grads, "clip_grad_by_total_norm_fp32")
    for module in (optimizer, distrib_optimizer):
        if hasattr(module, "clip_grad_by_total_norm_fp32"):
            module.clip_grad_by_total_norm_fp32 = clip_grads.clip_grad_by_total_norm_fp32


def _patch_random() -> None:
    from megatron.core.tensor_parallel import random

    class CpuRNGStatesTracker(random.CudaRNGStatesTracker):
        """The parent's named random streams, kept in the CPU generator (without the parent's deprecation warning)."""

        @contextlib.contextmanager
        def fork(self, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            if name not in self.states_:
                raise ValueError(f"the random stream {name!r} was never seeded; known are {sorted(self.states_)}")
            outer = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outer)

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    random.CudaRNGStatesTracker = CpuRNGStatesTracker


def _patch_token_dispatcher() -> None:
    """Have MoE's all-to-all convert its splits to numpy: it does so after a copy to the host, which is skipped here."""
    from megatron.core.transformer.moe import token_dispatcher

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_cpu


@functools.cache
def install() -> bool:
    """Make megatron-core usable in this process; call it before using megatron. Returns True on a CPU."""
    if not torch.cuda.is_available():
        # Megatron decorates functions with torch.compile at import; on a CPU that only costs time.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    with warnings.catch_warnings():
        # Each of these warnings says in one more module that TransformerEngine or Apex is absent.
        warnings.simplefilter("ignore")
        for name in _CORE_MODULES.split():
            importlib.import_module(f"megatron.core.{name}")
    if torch.cuda.is_available():
        return False
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and module is not None:
            _use_proxy(module)
    sys.meta_path.insert(0, _LateModules())
    _patch_random()
    _patch_optimizers()
    _patch_token_dispatcher()
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    return True
