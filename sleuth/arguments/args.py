"""`Args`: the whole configuration of a run. It is resolved once, frozen, printed and saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import ValidationInfo, model_validator

from sleuth.arguments.all_flags import AllFlags
from sleuth.arguments.checks import find_problems
from sleuth.arguments.sglang_flags import options_to_yaml
from sleuth.secrets import masked


class Args(AllFlags):
    """Every setting of a run; the groups in `run_flags.py` and `train_flags.py` list the fields."""

    @model_validator(mode="before")
    @classmethod
    def _without_training_data(cls, values: Any) -> Any:
        """With --eval-only, --prompt-data may be left out: the first evaluation set stands in for it."""
        if isinstance(values, dict) and values.get("eval_only") in (True, "true", "True"):
            pairs = values.get("eval_prompt_data") or []
            if "prompt_data" not in values:
                return {**values, "prompt_data": pairs[1] if len(pairs) > 1 else "none"}
        return values

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Self:
        context = info.context or {}
        if context.get("contradictory"):
            return self
        if problems := find_problems(self, context.get("given", ())):
            raise ValueError("\n".join(problems))
        return self

    def to_dict(self) -> dict[str, Any]:
        """All values in types that JSON has, to be shown and logged: secrets are masked."""
        return {name: masked(value) for name, value in self.model_dump(mode="json").items()}

    def to_yaml(self) -> str:
        """All values as YAML that `--custom-config-path` reads back, once each masked secret is put in."""
        values = self.to_dict()
        del values["custom_config_path"]
        custom = values.pop("custom_config", {})  # in a section, null is a value
        options = options_to_yaml(values.pop("sglang_options", {}))
        flags = {key: value for key, value in values.items() if value is not None}
        return yaml.safe_dump({**flags, **options, **custom}, sort_keys=False)

    def write(self, path: Path | str) -> None:
        """Write `to_yaml()` to `path`."""
        Path(path).write_text(self.to_yaml(), encoding="utf-8")
