"""Prompt data: rows of a file as rendered token ids with their labels, and the stream that deals them out.

rows = load_rows("train.parquet@[0:1000]", args, tokenizer)
stream = PromptStream(rows, seed=args.seed, shuffle=args.rollout_shuffle)
stream.next_groups(8)
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from transformers import AutoConfig, PreTrainedTokenizerBase

from sleuth.arguments import Args
from sleuth.data.records import Records, read_records
from sleuth.data.stream import RowStream

logger = logging.getLogger(__name__)

Prompt = str | list[dict[str, Any]]
CHECKED_ROWS = 16


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One row of prompt data. `index` is its row in the file; `prompt` is as in the file; `prompt_ids` is rendered."""

    index: int
    prompt: Prompt
    prompt_ids: list[int]
    label: Any
    metadata: dict[str, Any] = field(default_factory=dict)


class PromptStream(RowStream[PromptRow]):
    """The endless stream of training prompts."""

    def next_groups(self, count: int) -> list[PromptRow]:
        """The next `count` prompts, one for each group."""
        return self.next_rows(count)


def load_rows(
    path: str, args: Args, tokenizer: PreTrainedTokenizerBase, *, evaluation: bool = False
) -> list[PromptRow]:
    """The prompts of `path[@[a:b]]` in file order, rendered once.

    The columns are those of the flags (`--eval-input-key` and `--eval-label-key` if `evaluation`). A column
    `data_source`, where there is one, goes into each row's metadata. Prompts that leave no token of the context to
    generate are dropped, and the log says how many. Raises ValueError if a column is missing (naming those found), a
    prompt is not a prompt, or no row is left.
    """
    return _drop_long(list(_iter_rows(read_records(path), args, tokenizer, evaluation)), path, _context_limit(args))


def check_rows(path: str, args: Args, tokenizer: PreTrainedTokenizerBase, *, evaluation: bool = False) -> None:
    """Raise as `load_rows` would, as far as the first rows tell: a look before anything expensive starts."""
    records = read_records(path, limit=None if args.data_source_filter else CHECKED_ROWS)
    deque(islice(_iter_rows(records, args, tokenizer, evaluation), CHECKED_ROWS), maxlen=0)


def _iter_rows(
    records: Records, args: Args, tokenizer: PreTrainedTokenizerBase, evaluation: bool
) -> Iterator[PromptRow]:
    input_flag, label_flag = ("--eval-input-key", "--eval-label-key") if evaluation else ("--input-key", "--label-key")
    input_key = args.eval_input_key if evaluation else args.input_key
    label_key = args.eval_label_key if evaluation else args.label_key
    records.require(input_key, input_flag)
    records.require(label_key, label_flag)
    if args.tool_key:
        records.require(args.tool_key, "--tool-key")
    renderer = PromptRenderer(tokenizer, args.apply_chat_template, args.apply_chat_template_kwargs)
    for index, record in _selected(records, args.data_source_filter):
        prompt = _checked_prompt(record.get(input_key), f"row {index} of {records.path}, column {input_key!r}")
        ids = renderer.render(prompt, tools=record.get(args.tool_key) if args.tool_key else None)
        yield PromptRow(index, prompt, ids, record.get(label_key), _metadata(record, args.metadata_key))


@dataclass(frozen=True, slots=True)
class PromptRenderer:
    """Turns a prompt into token ids: through the chat template, or a text as it stands."""

    tokenizer: PreTrainedTokenizerBase
    apply_chat_template: bool
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.apply_chat_template and not self.tokenizer.chat_template:
            raise ValueError(
                "--apply-chat-template: the tokenizer has no chat template; use one that has, or drop the flag"
            )

    def render(self, prompt: Prompt, tools: Sequence[Any] | None = None) -> list[int]:
        """Token ids of the prompt, ending where the model is to begin. A text counts as one user message."""
        if self.apply_chat_template:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            options: dict[str, Any] = {"add_generation_prompt": True, "tools": tools or None, **self.template_kwargs}
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        elif isinstance(prompt, str):
            text = prompt
        else:
            raise ValueError("the prompt is a list of messages: add --apply-chat-template to render it")
        # The template has put in every special token there is to be.
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids


def _selected(records: Records, sources: list[str] | None) -> list[tuple[int, dict[str, Any]]]:
    """The records of the wanted data sources, each with its row in the file."""
    numbered = list(enumerate(records.rows, start=records.first))
    if sources is None:
        return numbered
    records.require("data_source", "--data-source-filter")
    selected = [(index, row) for index, row in numbered if row.get("data_source") in sources]
    if not selected:
        found = sorted({str(row.get("data_source")) for row in records.rows})
        raise ValueError(f"no row of {records.path} has a data_source of {sources}; found {', '.join(found)}")
    return selected


def _checked_prompt(value: Any, where: str) -> Prompt:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(isinstance(m, dict) and "role" in m and "content" in m for m in value):
        return value
    raise ValueError(f"expected a text or a list of messages with role and content in {where}, found {value!r:.200}")


def _metadata(record: dict[str, Any], key: str) -> dict[str, Any]:
    value = record.get(key)
    metadata = dict(value) if isinstance(value, dict) else {}
    if record.get("data_source") is not None:
        metadata.setdefault("data_source", record["data_source"])
    return metadata


def _context_limit(args: Args) -> int:
    """Tokens of a whole trajectory, at most."""
    if args.rollout_max_context_len is not None:
        return args.rollout_max_context_len
    limit: int = AutoConfig.from_pretrained(args.hf_checkpoint).max_position_embeddings
    return limit


def _drop_long(rows: list[PromptRow], path: str, limit: int) -> list[PromptRow]:
    kept = [row for row in rows if len(row.prompt_ids) < limit]
    if len(kept) < len(rows):
        logger.warning(
            "%s: dropped %d of %d prompts of %d tokens or more", path, len(rows) - len(kept), len(rows), limit
        )
    if not kept:
        raise ValueError(
            f"none of the {len(rows)} prompts of {path} is shorter than the context of {limit} tokens; "
            "raise --rollout-max-context-len or shorten the prompts"
        )
    return kept
