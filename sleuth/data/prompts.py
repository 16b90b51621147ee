"""Prompt data: the rows of a file, rendered to token ids, and the stream that gives them out.

rows = load_rows("train.parquet@[0:1000]", args, tokenizer)
stream = PromptStream(rows, seed=args.seed, shuffle=args.rollout_shuffle)
stream.next_groups(8)
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from transformers import AutoConfig, PreTrainedTokenizerBase

from sleuth.arguments import Args
from sleuth.data.messages import Prompt, read_prompt, read_tools
from sleuth.data.records import CHECKED_ROWS, Records, read_records
from sleuth.data.render import PromptRenderer
from sleuth.data.stream import RowStream
from sleuth.labels import is_blank
from sleuth.prompt_templates import PromptTemplate

logger = logging.getLogger(__name__)

NAMED_ROWS = 5
"""Rows that a warning names."""


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One row of prompt data: row `index` of `file`.

    `prompt` (a text or messages) and `label` are as in the file; `prompt_ids` is the rendered prompt.
    """

    index: int
    prompt: Prompt
    prompt_ids: list[int]
    label: Any
    metadata: dict[str, Any] = field(default_factory=dict)
    file: str | None = None


class PromptStream(RowStream[PromptRow]):
    """The endless stream of training prompts."""

    def next_groups(self, count: int) -> list[PromptRow]:
        """The next `count` prompts, one for each group."""
        return self.next_rows(count)

    def _row_bytes(self, row: PromptRow) -> bytes:
        return array("i", row.prompt_ids).tobytes() + super()._row_bytes(row.label)


def load_rows(
    path: str, args: Args, tokenizer: PreTrainedTokenizerBase, *, evaluation: bool = False
) -> list[PromptRow]:
    """The prompts of `path[@[a:b]]` in file order, rendered once, within --prompt-template where it is given.

    The columns are those of the flags (`--eval-input-key` and `--eval-label-key` if `evaluation`). A column
    `data_source`, where there is one, goes into each row's metadata. Prompts that leave no token of the context to
    generate are dropped, and the log says how many; it also says how many rows have no answer in their label. Raises
    ValueError if a column is missing (naming those found), a prompt is not a prompt, or no row is left.
    """
    keys = Keys.of(args, evaluation)
    rows = _drop_long(list(_iter_rows(_read(path, keys), keys, args, tokenizer)), path, _context_limit(args))
    _tell_blank_labels(rows, path, keys.label)
    return rows


def check_rows(
    path: str, args: Args, tokenizer: PreTrainedTokenizerBase, *, evaluation: bool = False
) -> list[PromptRow]:
    """The first rows; raises what `load_rows` would raise for them: a quick check before anything expensive starts."""
    keys = Keys.of(args, evaluation)
    records = _read(path, keys, limit=None if keys.sources else CHECKED_ROWS)
    return list(islice(_iter_rows(records, keys, args, tokenizer), CHECKED_ROWS))


def check_labels(path: str, args: Args, can_win: Callable[[Any], bool], *, evaluation: bool = False) -> str | None:
    """Ask a reward hook about every label; returns a sentence about the rows that no answer can win, if there are any.

    `can_win(label)` says whether some answer earns the reward, and raises ValueError for a label that it cannot read;
    that error is raised again with file, row and column.
    """
    keys = Keys.of(args, evaluation)
    records = read_records(path, {keys.label, "data_source"}, default_file=keys.default_file)
    records.require(keys.label, keys.label_flag)
    lost, selected = [], _selected(records, keys)
    for index, record in selected:
        try:
            if not can_win(record.get(keys.label)):
                lost.append(index)
        except ValueError as error:
            where = f"row {index} of {records.path}, column {keys.label!r} ({keys.label_flag})"
            raise ValueError(f"{where}: {error}") from None
    if not lost:
        return None
    return (
        f"{path}: {len(lost)} of {len(selected)} rows have no accepted answer in the column {keys.label!r}, so that "
        f"none can be right there (rows {_listed(lost)}); leave them out, or name another column with {keys.label_flag}"
    )


@dataclass(frozen=True, slots=True)
class Keys:
    """The columns and rows that the flags of training, or those of evaluation, name."""

    input: str
    label: str
    tools: str | None
    metadata: str
    prefix: str
    """What the flags begin with: `--`, or `--eval-`."""
    sources: list[str] | None
    """The wanted data sources [all]."""
    default_file: str
    """Which file of a hub's data set is meant where none is named."""

    @classmethod
    def of(cls, args: Args, evaluation: bool) -> Keys:
        common = (args.tool_key, args.metadata_key)
        if evaluation:
            columns = (args.eval_input_key, args.eval_label_key)
            return cls(*columns, *common, "--eval-", args.eval_data_source_filter, "test.parquet")
        return cls(args.input_key, args.label_key, *common, "--", args.data_source_filter, "train.parquet")

    @property
    def input_flag(self) -> str:
        return f"{self.prefix}input-key"

    @property
    def label_flag(self) -> str:
        return f"{self.prefix}label-key"


def _read(path: str, keys: Keys, limit: int | None = None) -> Records:
    needed = {keys.input: keys.input_flag, keys.label: keys.label_flag}
    if keys.tools:
        needed[keys.tools] = "--tool-key"
    columns = {*needed, keys.metadata, "data_source"}
    records = read_records(path, columns, limit, default_file=keys.default_file)
    if limit is not None and not set(needed) <= set(records.columns):
        records = read_records(path, columns, default_file=keys.default_file)  # in JSONL only later rows may have a key
    for column, flag in needed.items():
        records.require(column, flag)
    return records


def _iter_rows(records: Records, keys: Keys, args: Args, tokenizer: PreTrainedTokenizerBase) -> Iterator[PromptRow]:
    renderer = PromptRenderer(tokenizer, args.apply_chat_template, args.apply_chat_template_kwargs)
    template = PromptTemplate.load(args.prompt_template) if args.prompt_template else None
    one_object: dict[int, int] = {}  # for each token id: a list of new integers takes five times the memory
    for index, record in _selected(records, keys):
        row = f"row {index} of {records.path}"
        where = f"{row}, column {keys.input!r} ({keys.input_flag})"
        prompt = read_prompt(record.get(keys.input), where, padded=records.padded)
        if template is not None:
            prompt = template.fill(_question(prompt, where, keys))
        tools = None
        if keys.tools:
            tools_where = f"{row}, column {keys.tools!r} (--tool-key)"
            tools = read_tools(record.get(keys.tools), tools_where, padded=records.padded)
            where += f" with {keys.tools!r}"
        ids = [one_object.setdefault(token, token) for token in renderer.render(prompt, tools, where)]
        metadata = _metadata(record, keys.metadata)
        yield PromptRow(index, prompt, ids, record.get(keys.label), metadata, records.path)


def _question(prompt: Prompt, where: str, keys: Keys) -> str:
    if isinstance(prompt, str):
        return prompt
    raise ValueError(
        f"--prompt-template expects a bare question, a text, in {where}; found a list of messages, which may hold an "
        f"instruction already: name the column of the questions with {keys.input_flag}, or drop --prompt-template"
    )


def _selected(records: Records, keys: Keys) -> list[tuple[int, dict[str, Any]]]:
    """The records of the wanted data sources, each with its row number in the file."""
    numbered = list(enumerate(records.rows, start=records.first))
    if keys.sources is None:
        return numbered
    flag = f"{keys.prefix}data-source-filter"
    records.require("data_source", flag)
    selected = [(index, row) for index, row in numbered if row.get("data_source") in keys.sources]
    if not selected:
        found = sorted({str(row.get("data_source")) for row in records.rows})
        raise ValueError(
            f"no row of {records.path} has a data_source of {keys.sources} ({flag}); found {', '.join(found)}"
        )
    return selected


def _metadata(record: dict[str, Any], key: str) -> dict[str, Any]:
    value = record.get(key)
    metadata = dict(value) if isinstance(value, dict) else {}
    if record.get("data_source") is not None:
        metadata.setdefault("data_source", record["data_source"])
    return metadata


def _context_limit(args: Args) -> int:
    """The most tokens of a whole trajectory."""
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


def _tell_blank_labels(rows: list[PromptRow], path: str, column: str) -> None:
    blank = [row.index for row in rows if is_blank(row.label)]
    if blank:
        logger.warning(
            "%s: %d of %d rows have no answer in their label, column %r (rows %s): a reward that compares with the "
            "label is never given there",
            path,
            len(blank),
            len(rows),
            column,
            _listed(blank),
        )


def _listed(rows: list[int]) -> str:
    """The first numbers, such as `1, 3, 4, 5, 6, ...`."""
    return ", ".join(map(str, rows[:NAMED_ROWS])) + (", ..." if len(rows) > NAMED_ROWS else "")
