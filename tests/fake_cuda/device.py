"""A GPU that is not there: torch's fake CUDA tensors, which have shapes and no data, and a meter of their memory.

For a process of its own (it changes torch for good). `load_guard` comes before torch is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import traceback
import weakref
from collections import Counter
from pathlib import Path
from typing import Any


def load_guard(library: Path) -> None:
    """Let a CPU build of torch know CUDA tensors (see guard.cpp)."""
    assert "torch" not in sys.modules, "the guard must be there when torch is loaded"
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


class _Nothing:
    """A stream, an event: whatever is asked of it, nothing happens."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: _Nothing()

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *args: object) -> None: ...


class FakeGPU:
    """Memory and synchronisations of what runs within `with gpu.active():`.

    `live` and `peak` are bytes on the device, `waits` the places where the host waited for it, `attention` how often
    each kernel of torch's attention over rows was called.
    """

    def __init__(self) -> None:
        import torch
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

        self.torch, self.fake_tensor = torch, FakeTensor
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.waits: Counter[str] = Counter()
        self.attention: Counter[str] = Counter()
        self.live = self.peak = 0
        self._storages: dict[int, tuple[Any, int]] = {}
        self._pretend_cuda()
        self._plain_modules()
        torch._C._set_only_lift_cpu_tensors(True)

    def reset(self) -> None:
        """Ask every storage for its size, which may have changed, and count peak and waits from now on."""
        for key, (storage, _) in list(self._storages.items()):
            held = storage()
            self._storages[key] = (storage, 0 if held is None else held.nbytes())
        self.live = self.peak = sum(size for _, size in self._storages.values())
        self.waits.clear()
        self.attention.clear()

    @contextlib.contextmanager
    def active(self) -> Any:
        with _int_devices(self), self.mode, _meter(self):
            yield self

    def note(self, tensor: Any) -> None:
        if not isinstance(tensor, self.fake_tensor) or tensor.fake_device.type != "cuda":
            return
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key not in self._storages:
            self._storages[key] = (weakref.ref(storage, lambda _: self._gone(key)), size)
            self.live += size
            self.peak = max(self.peak, self.live)

    def _gone(self, key: int) -> None:
        self.live -= self._storages.pop(key)[1]

    def waited(self, what: str) -> None:
        own = ("site-packages/torch/", "fake_cuda/")
        frames = [frame for frame in traceback.extract_stack() if not any(part in frame.filename for part in own)]
        place = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno} {frames[-1].line}" if frames else "?"
        self.waits[f"{what} at {place}"] += 1

    def _pretend_cuda(self) -> None:
        torch = self.torch
        properties = type("Properties", (), {"major": 9, "minor": 0, "multi_processor_count": 132})()
        answers = {
            "is_available": True,
            "current_device": 0,
            "device_count": 8,
            "get_device_capability": (9, 0),
            "get_rng_state": torch.ByteTensor(16),
            "is_current_stream_capturing": False,
            "get_device_properties": properties,
            **dict.fromkeys(("set_device", "empty_cache", "manual_seed", "set_rng_state", "_lazy_init")),
        }
        for name, answer in answers.items():
            setattr(torch.cuda, name, lambda *args, answer=answer, **kwargs: answer)
        torch.cuda.synchronize = lambda *args: self.waited("synchronize")
        for name in ("Stream", "Event", "current_stream", "default_stream", "stream"):
            setattr(torch.cuda, name, _Nothing)
        torch.backends.cuda.is_built = lambda: True

    def _plain_modules(self) -> None:
        """What fake tensors cannot do, and need not: moving modules, pinning memory."""
        torch = self.torch
        for name in ("to", "cuda", "bfloat16"):
            setattr(torch.nn.Module, name, lambda module, *args, **kwargs: _on_device(module))
        torch.Tensor.pin_memory = lambda tensor, *args: tensor
        for name in ("empty", "empty_like"):
            setattr(torch, name, _without_pinning(getattr(torch, name)))

        def attention(q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, **kwargs: Any) -> Any:
            """The kernel that CUDA takes for bfloat16; without CUDA torch would take another."""
            kwargs.pop("enable_gqa", None)
            causal, scale = kwargs.get("is_causal", False), kwargs.get("scale")
            return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[0]

        torch.nn.functional.scaled_dot_product_attention = attention

        torch.nn.functional.rms_norm = lambda x, shape, weight, eps: _fused_norm().apply(x, weight)


def _on_device(module: Any) -> Any:
    """Move the parameters that are not on the device (a router's). Fake ones cannot change place, so they are new."""
    import torch

    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.device.type == "cpu":
                there = torch.empty(parameter.shape, dtype=parameter.dtype, device="cuda:0")
                moved = torch.nn.Parameter(there, parameter.requires_grad)
                moved.__dict__.update(parameter.__dict__ | moved.__dict__)  # its own: where a fake tensor lies
                part._parameters[name] = moved
    return module


def _fused_norm() -> Any:
    """CUDA's fused norm keeps its input and one number a row. Without CUDA torch would keep several float32 copies."""
    import torch

    class FusedNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
            return torch.empty_like(x)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, Any]:
            x, weight, _ = ctx.saved_tensors
            return torch.empty_like(x), torch.empty_like(weight)

    return FusedNorm


def _without_pinning(function: Any) -> Any:
    def called(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return called


def _int_devices(gpu: FakeGPU) -> Any:
    """Megatron says `device=torch.cuda.current_device()`, a number, which torch reads as a device that is not here."""
    torch = gpu.torch
    from torch.overrides import TorchFunctionMode

    class IntDevices(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if type(kwargs.get("device")) is int:
                kwargs["device"] = f"cuda:{kwargs['device']}"
            if func is torch.Tensor.cuda:
                return args[0].to("cuda:0")
            if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
                args = (args[0], f"cuda:{args[1]}", *args[2:])
            if func is torch.tensor and isinstance(args[0], list):
                leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(args[0]) if torch.is_tensor(leaf)]
                for _ in leaves:
                    gpu.waited("one copy to the host each")
                if leaves:
                    return torch.zeros(len(leaves), device=kwargs.get("device"))
            return func(*args, **kwargs)

    return IntDevices()


def _meter(gpu: FakeGPU) -> Any:
    torch, fake = gpu.torch, gpu.fake_tensor
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten
    map_tensors = torch.utils._pytree.tree_map_only

    class Meter(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            on_device = args and isinstance(args[0], fake) and args[0].fake_device.type == "cuda"
            if func is aten._local_scalar_dense.default and isinstance(args[0], fake):
                if on_device:
                    gpu.waited("item")
                return 1.0 if args[0].dtype.is_floating_point else 1
            if func is aten.equal.default and on_device:
                gpu.waited("equal")
                return True
            if func.namespace == "torch_attn":
                gpu.attention[func.name().removeprefix("torch_attn::")] += 1
            if "nonzero" in func.name() and on_device:
                gpu.waited("nonzero")
            if _to_host(func.name(), args, kwargs):
                gpu.waited("copy to the host")
            args, kwargs = map_tensors(torch.Tensor, self.faked, (args, kwargs))
            out = func(*args, **kwargs)
            map_tensors(torch.Tensor, gpu.note, out)
            return out

        @staticmethod
        def faked(tensor: Any) -> Any:
            tensor = tensor if isinstance(tensor, fake) else gpu.mode.from_tensor(tensor)
            tensor.constant = None  # else torch computes with a real value
            return tensor

    def _to_host(name: str, args: Any, kwargs: Any) -> bool:
        """Whether the host waits for a copy from the device."""
        if name == "aten::copy_":
            source, target = args[1], args[0].device
            waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        elif name == "aten::_to_copy":
            source, target = args[0], kwargs.get("device")
            waits = not kwargs.get("non_blocking")
        else:
            return False
        from_device = isinstance(source, fake) and source.fake_device.type == "cuda"
        return bool(from_device and waits and target is not None and torch.device(target).type == "cpu")

    return Meter()
