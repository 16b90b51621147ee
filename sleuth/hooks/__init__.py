"""Everything that a hook imports, in one place; docs/hooks.md explains how it fits together.

from sleuth.hooks import Conversation, Sample, SampleStatus, Settings, StopReason
"""

from sleuth.hooks.context import (
    Engine,
    FailSample,
    Generation,
    RolloutContext,
    StopRunError,
    drain_step_metrics,
    rollout_context,
    share_of,
    step_metrics,
    use_rollout_context,
)
from sleuth.hooks.conversation import Conversation, Turn
from sleuth.hooks.loader import (
    HookKind,
    accepts_evaluation,
    check_hooks,
    describe_hooks,
    hook_modules,
    load_hook,
    named_hooks,
)
from sleuth.hooks.settings import Settings, SettingsPart, declared_settings, resolve_sections
from sleuth.sample import Sample, SampleStatus, Segment, Source, StopReason, TokenTrace
from sleuth.tokens import decode, encode

__all__ = [
    "Conversation",
    "Engine",
    "FailSample",
    "Generation",
    "HookKind",
    "RolloutContext",
    "Sample",
    "SampleStatus",
    "Segment",
    "Settings",
    "SettingsPart",
    "Source",
    "StopReason",
    "StopRunError",
    "TokenTrace",
    "Turn",
    "accepts_evaluation",
    "check_hooks",
    "declared_settings",
    "decode",
    "describe_hooks",
    "drain_step_metrics",
    "encode",
    "hook_modules",
    "load_hook",
    "named_hooks",
    "resolve_sections",
    "rollout_context",
    "share_of",
    "step_metrics",
    "use_rollout_context",
]
