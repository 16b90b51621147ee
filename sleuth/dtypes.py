"""What `auto` means where a precision is asked for: the one place that decides it, for trainer and engines."""

from __future__ import annotations


def dtype_name(name: str, *, on_gpu: bool) -> str:
    """`auto` is bfloat16 on GPUs, else float32; any other name is itself."""
    if name != "auto":
        return name
    return "bfloat16" if on_gpu else "float32"
