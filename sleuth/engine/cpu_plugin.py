"""A plugin of SGLang's: on CPUs, attention for many requests at once, and sampling without a random number per word.

SGLang finds it by the entry point in `cpu_stubs/`, which `sleuth.engine.server` puts on the path of engines on CPUs.
What is computed stays the same: attention differs by rounding, and tokens are drawn from the same probabilities.
`SGLANG_PLUGINS=none` in the environment leaves it out.
"""

from __future__ import annotations

import sys

IN_PLACE = "sleuth: attention and sampling for CPUs are in place"
"""What each process of an engine writes into its log."""


def register() -> None:
    """Put our attention and our sampling in the place of SGLang's; it calls this in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sleuth.engine.cpu_attention import BatchedAttention
    from sleuth.engine.cpu_sampling import draw_tokens

    attention = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    HookRegistry.register(attention, BatchedAttention, HookType.REPLACE)
    HookRegistry.register("sglang.srt.layers.sampler.sampling_from_probs_torch", draw_tokens, HookType.AROUND)
    sys.stderr.write(f"{IN_PLACE}\n")  # SGLang sets up its logging later
