"""What a run with given flags needs: model, tokenizer, data, hooks, search, room for its checkpoints, Ray.

The checks are those of a run's own start (`sleuth.cluster.preflight`), each told by itself.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from sleuth.arguments import Args, check_files, check_tokenizer, read_hf_config
from sleuth.arguments.files_check import data_problems
from sleuth.arguments.model_check import contradictions, model_flags
from sleuth.arguments.model_scripts import known_model
from sleuth.chat_template import ToolTemplate
from sleuth.cluster.preflight import (
    ask_services,
    bare_questions,
    check_data,
    check_disk,
    unwinnable_rows,
    with_hook_settings,
    with_model,
)
from sleuth.data import PromptRow
from sleuth.data.records import read_records
from sleuth.data_path import DataPath
from sleuth.doctor.findings import Check, Finding, note, ok, wrong
from sleuth.hooks import describe_hooks, hook_modules
from sleuth.labels import as_text
from sleuth.rollout.engine_client import embedding_size
from sleuth.sample import shortened
from sleuth.tokens import decode, encode, load_tokenizer

EXAMPLES = 3
LONGEST_EXAMPLE = 2000
"""Characters of a rendered example that are shown."""
QUESTION, ANSWER, FURTHER = "A stand-in question", "A stand-in answer", "A stand-in further question"


class RunChecks:
    """The checks of one run; a later one uses what an earlier one found."""

    def __init__(self, args: Args) -> None:
        self.args = args
        self._fits = False
        self._no_tokenizer = False
        self._rows: dict[str, list[PromptRow]] = {}

    def checks(self) -> list[tuple[str, Check]]:
        """By the name under which a check that fails is told; those of the model first."""
        return [
            ("hooks", self.hooks),
            ("files", self.files),
            ("model", self.model),
            ("weights", self.weights),
            ("tokenizer", self.tokenizer),
            ("chat template", self.chat_template),
            ("stop tags", self.stop_tags),
            ("data", self.data),
            ("labels", self.labels),
            ("devices", self.devices),
            ("checkpoints", self.checkpoints),
            ("ray", self.ray),
            ("search", self.search),
        ]

    def hooks(self) -> Iterator[Finding]:
        self.args = with_hook_settings(self.args, hook_modules(self.args))
        for name, hook in describe_hooks(self.args):
            yield ok("hooks", f"{name}: {hook}")

    def files(self) -> Iterator[Finding]:
        check_files(self.args)
        yield ok("files", "all that the flags name are there, and the folders of results can be written")

    def model(self) -> Iterator[Finding]:
        """The shape in config.json against the flags (MODEL_ARGS), the layout, and scripts/models/."""
        shape = model_flags(read_hf_config(self.args))
        self.args = with_model(self.args)
        self._fits = True
        layers, width = shape["num_layers"], shape["hidden_size"]
        yield ok("model", f"config.json of {self.args.hf_checkpoint} fits the flags: {layers} layers of {width}")
        known = known_model(self.args.hf_checkpoint)
        if known is None:
            return
        flags = self.args.model_copy(update=known.shape)
        if problems := contradictions(flags, shape, "its config.json"):
            yield note("model", f"{known.script}, which is named like it, is of another shape: {'; '.join(problems)}")
        else:
            yield ok("model", f"MODEL_ARGS of {known.script} are those of its config.json")

    def weights(self) -> Iterator[Finding]:
        """Names and shapes of the tensors, from the headers of the files."""
        from sleuth.megatron.model import ModelShape  # imports Megatron, which takes seconds
        from sleuth.megatron.weights import checked_weights, hf_names

        folder = self._folder()
        shape = ModelShape.from_hf(folder)
        checked_weights(folder, shape)
        yield ok("weights", f"the {len(hf_names(shape))} tensors of the model are in {folder}")

    def tokenizer(self) -> Iterator[Finding]:
        tokenizer, size = self._tokenizer(), embedding_size(self._folder())
        check_tokenizer(tokenizer, size)
        yield ok("tokenizer", f"{len(tokenizer)} tokens, all below the model's vocab_size {size}")
        special = {"end of sequence": tokenizer.eos_token, "padding": tokenizer.pad_token}
        shown = ", ".join(f"{name} {token!r}" for name, token in special.items())
        if tokenizer.eos_token is None:
            yield wrong("tokenizer", "expected a token that ends a sequence (eos_token), found none; set it")
        else:
            yield ok("tokenizer", f"special tokens: {shown}")

    def chat_template(self) -> Iterator[Finding]:
        """Whether there is one where it is needed, and whether a conversation can be appended to it."""
        tokenizer, args = self._tokenizer(), self.args
        if not args.apply_chat_template:
            text = "not used; prompts are as in the file (--apply-chat-template)"
            yield ok("chat template", text if tokenizer.chat_template else "none, and none is used")
            return
        if not tokenizer.chat_template:
            yield wrong("chat template", "expected one for --apply-chat-template, found none; drop the flag")
            return
        if args.custom_generate_function_path and "tools" in args.custom_generate_function_path:
            ToolTemplate(tokenizer, [_TOOL], args.apply_chat_template_kwargs).check()
            yield ok("chat template", "tool calls and results can be appended token by token")
        if _is_append_only(tokenizer, args.apply_chat_template_kwargs):
            yield ok("chat template", "append-only: a further turn leaves what stands before it as it was")
        else:
            yield note(
                "chat template",
                "not append-only: it writes an earlier turn of the model differently once another follows. The hooks "
                "here never render a conversation again; a hook of yours must append token ids, too",
            )

    def stop_tags(self) -> Iterator[Finding]:
        """The stop strings of the generate hook, and those of the flags, as the tokenizer has them."""
        tokenizer = self._tokenizer()
        module = sys.modules.get((self.args.custom_generate_function_path or "").rpartition(".")[0])
        stops = [*getattr(module, "STOP", ()), *self.args.rollout_stop]
        if not stops:
            yield ok("stop tags", "none: a turn ends with the end of sequence or at its limit")
        for stop in stops:
            ids = encode(stop, tokenizer).ids
            if decode(ids, tokenizer).strip() != stop.strip():
                found = decode(ids, tokenizer)
                yield wrong("stop tags", f"{stop!r} becomes {found!r} in this tokenizer: the model cannot write it")
                continue
            after = encode(f"{stop}\n\n", tokenizer).ids
            merges = (
                "" if after[: len(ids)] == ids else "; its last token merges with what follows, which is allowed for"
            )
            yield ok("stop tags", f"{stop!r} is {len(ids)} token{'s' if len(ids) > 1 else ''}{merges}")

    def data(self) -> Iterator[Finding]:
        """Columns, and the first rows as the model will see them; `files` tells of those that are missing."""
        if any(data_problems(self.args)):
            yield note("data", "not looked at, since a file is missing")
            return
        tokenizer = self._tokenizer()
        if self.args.loss_type == "sft":
            check_data(self.args)
            yield ok("data", f"the first rows of {self.args.prompt_data} are trajectories")
            return
        self._rows = check_data(self.args)
        for path, rows in self._rows.items():
            yield from self._file(path, rows, tokenizer)
        for warning in bare_questions(self.args, self._rows):
            yield note("data", warning)

    def _file(self, path: str, rows: list[PromptRow], tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
        default = "train.parquet" if path == self.args.prompt_data else "test.parquet"
        columns = read_records(path, limit=1, default_file=default).columns
        yield ok("data", f"{DataPath.parse(path).path}: columns {', '.join(columns)}")
        limit = self.args.rollout_max_context_len if self._fits else None
        for row in rows[:EXAMPLES]:
            length = len(row.prompt_ids)
            room = "" if limit is None else f", which leaves {limit - length} of the context"
            text = f"row {row.index}: {length} tokens{room}; right answers: {as_text(row.label)}"
            details = shortened(decode(row.prompt_ids, tokenizer), LONGEST_EXAMPLE)
            yield (
                ok("data", text, details)
                if not room or length < (limit or 0)
                else wrong("data", f"{text}; raise --rollout-max-context-len, or leave the row out")
            )

    def labels(self) -> Iterator[Finding]:
        if not self._rows:  # trajectories, or data that are wrong
            return
        found = unwinnable_rows(self.args, hook_modules(self.args))
        yield from (note("labels", sentence) for sentence in found)
        if not found:
            yield ok("labels", "every row has an accepted answer that the reward hook reads, as far as it says so")

    def devices(self) -> Iterator[Finding]:
        import torch

        wanted = self.args.total_gpus
        if torch.version.cuda is None or self.args.ray_address:
            yield ok("devices", f"{wanted} wanted (processes on a CPU, GPUs elsewhere)")
            return
        found = torch.cuda.device_count()
        if found < wanted:
            yield wrong(
                "devices", f"expected {wanted} GPUs on this machine, found {found}; use fewer, or --ray-address"
            )
        else:
            yield ok("devices", f"{wanted} of {found} GPUs are used")

    def checkpoints(self) -> Iterator[Finding]:
        if self.args.save is None:
            yield note("checkpoints", "nothing is saved; add --save FOLDER to go on after an interruption")
        elif self._folder() and (warning := check_disk(self.args)):
            yield note("checkpoints", warning)
        else:
            yield ok("checkpoints", f"there is room for those that are kept in {self.args.save}")

    def ray(self) -> Iterator[Finding]:
        from sleuth.cluster.ray_environment import check_ray, cluster_address

        check_ray(self.args)
        found = cluster_address(self.args)
        yield ok("ray", "starts on this machine" if found is None else f"a cluster answers at {found[0]}")

    def search(self) -> Iterator[Finding]:
        """One real query."""
        if not self.args.search_check:
            yield ok("search", "not asked (--no-search-check)")
            return
        modules = hook_modules(self.args)
        if not any(hasattr(module, "check_services") for module in modules):
            yield ok("search", "the hooks ask no service")
            return
        start = time.perf_counter()
        if trouble := ask_services(self.args, modules):
            yield wrong("search", trouble)
        else:
            yield ok("search", f"a test question was answered in {time.perf_counter() - start:.2f} s")

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer; ValueError, with the reason at the first call alone, if there is none that can be loaded."""
        if self._no_tokenizer:
            raise ValueError("not looked at, since the tokenizer cannot be loaded")
        folder = self._folder()
        try:
            return load_tokenizer(folder)
        except ValueError:
            self._no_tokenizer = True
            raise

    def _folder(self) -> Path:
        """The model's folder; ValueError if there is none: the libraries would ask the hub for it, again and again."""
        folder = Path(self.args.hf_checkpoint)
        if not (folder / "config.json").is_file():
            raise ValueError(f"not looked at, since there is no model in {folder}")
        return folder


_TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


def _is_append_only(tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]) -> bool:
    """Whether prompt and answer stay as they were when a further question follows."""
    opening = [{"role": "user", "content": QUESTION}]
    answered = [*opening, {"role": "assistant", "content": ANSWER}]
    further = [*answered, {"role": "user", "content": FURTHER}]

    def render(messages: list[dict[str, str]], prompt: bool) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **settings))

    begun, whole = render(opening, True), render(further, True)
    return whole.startswith(begun + ANSWER) and whole.startswith(render(answered, False).rstrip())
