"""Instructions around bare questions: named ones, files, and how prompts without an instruction are found."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import generate_with_search
import generate_with_tools
from qa_em_format import score_response
from sleuth.arguments import ArgumentsError, parse_args
from sleuth.cluster.preflight import bare_questions
from sleuth.prompt_templates import TAGS_INSTRUCTION, TEMPLATES, PromptTemplate, lack_instruction

QUESTIONS = ["Who wrote Faust?", "In what year did Foch die?", "when is the next scandal episode"]


def test_the_instruction_of_tags_names_what_the_hook_reads() -> None:
    for tag in ("think", "search", "information", "answer"):
        assert f"<{tag}>" in TAGS_INSTRUCTION
        assert f"</{tag}>" in TAGS_INSTRUCTION
    example = TAGS_INSTRUCTION[TAGS_INSTRUCTION.index("<answer> Lake") : -1]
    assert generate_with_search.postprocess_predictions(example) == ("answer", "Lake Victoria")
    assert score_response([("model", f"<think>x</think>{example}")], "Lake Victoria").reward == 1.0


def test_the_instruction_of_tools_is_what_the_hook_adds_by_itself() -> None:
    settings: Any = SimpleNamespace(instruction=generate_with_tools.ToolSettings.model_fields["instruction"].default)
    assert PromptTemplate.load("tools").fill("Who?") == generate_with_tools._messages("Who?", settings)


def test_files(tmp_path: Path) -> None:
    text, messages = tmp_path / "a.txt", tmp_path / "b.json"
    text.write_text("\ufeffQ: {question} {other}\nA:\n", encoding="utf-8")
    assert PromptTemplate.load(str(text)).fill("Who?") == "Q: Who? {other}\nA:"
    messages.write_text('[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{question}"}]')
    assert PromptTemplate.load(str(messages)).fill("Who?")[1] == {"role": "user", "content": "Who?"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"no place", r"expected the place of the question, \{question\}, in .*a.txt, found none"),
        ("a.txt", b"\xff{question}", "it is not UTF-8"),
        ("a.json", b"{question}", "expected JSON in"),
        ("a.json", b'[{"role": "user"}]', "expected a list of messages with role and content"),
        ("a.json", b"[]", "expected a list of messages"),
    ],
)
def test_what_is_no_template_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        PromptTemplate.load(str(tmp_path / name))


def test_a_name_that_is_none_and_a_template_without_its_flag_are_told_at_once() -> None:
    base = ["--hf-checkpoint", "m", "--prompt-data", "d.jsonl", "--colocate", "--custom-rm-path", "a.b"]
    with pytest.raises(ArgumentsError, match=r"expected tags or tools, or a text file, found tagz \(No such file"):
        parse_args([*base, "--prompt-template", "tagz"])
    with pytest.raises(ArgumentsError, match="makes messages, which need --apply-chat-template"):
        parse_args([*base, "--prompt-template", "tools"])
    parse_args([*base, "--prompt-template", "tools", "--apply-chat-template"])


@pytest.mark.parametrize("template", ["Search, then answer briefly. Question: {question}", *TEMPLATES])
def test_prompts_with_an_instruction_are_no_bare_questions(template: str) -> None:
    filled = PromptTemplate(template) if "{" in template else PromptTemplate.load(template)
    assert not lack_instruction([filled.fill(question) for question in QUESTIONS])


def test_bare_questions_are_found() -> None:
    assert lack_instruction(QUESTIONS)
    assert lack_instruction([[{"role": "user", "content": question}] for question in QUESTIONS])
    assert lack_instruction([f"Question: {question}" for question in QUESTIONS])
    assert not lack_instruction([])
    assert not lack_instruction(QUESTIONS[:1] * 5)  # one question tells nothing
    assert not lack_instruction([f"{question}\nThink first, then answer in a few words." for question in QUESTIONS])


@pytest.mark.parametrize(
    ("hook", "template", "warned"),
    [
        ("generate_with_search.generate", None, True),
        ("generate_with_search.generate", "tags", False),
        ("generate_with_tools.generate", None, False),  # says it by itself
        ("examples.calculator.generate", None, False),  # a protocol of its own
        (None, None, False),
    ],
)
def test_a_run_with_bare_questions_is_told_what_to_add(hook: str | None, template: str | None, warned: bool) -> None:
    args: Any = SimpleNamespace(custom_generate_function_path=hook, prompt_template=template)
    rows: Any = {"a.parquet": [SimpleNamespace(prompt=question) for question in QUESTIONS]}
    found = list(bare_questions(args, rows))
    assert len(found) == int(warned)
    assert not found or "prompts of a.parquet are bare questions, such as 'Who wrote Faust?'" in found[0]
    assert not found or "--prompt-template tags" in found[0]
