"""What `auto` means where a precision is asked for: the one place that decides it, for trainer and engines."""

from __future__ import annotations

from pathlib import Path

CPU_FLAGS_FOR_BFLOAT16 = {"avx512_bf16", "amx_bf16"}


def dtype_name(name: str, *, on_gpu: bool) -> str:
    """`auto` is bfloat16 on GPUs, else float32; any other name is itself."""
    if name != "auto":
        return name
    return "bfloat16" if on_gpu else "float32"


def slow_on_cpu(name: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """A warning where the precision `name` is bfloat16 and this CPU has no instructions for it; else None.

    `cpuinfo` is Linux's list of what the processor can do; where there is none, nothing is known and nothing said.
    """
    if name != "bfloat16" or not cpuinfo.exists():
        return None
    if CPU_FLAGS_FOR_BFLOAT16 & set(cpuinfo.read_text(encoding="utf-8", errors="replace").split()):
        return None
    return (
        "bfloat16 is about ten times slower than float32 on this CPU, which has no instructions for it (avx512_bf16 or "
        "amx_bf16): use float32"
    )
