"""Texts and messages to token ids: what tokenizers and templates add, what they raise, and an assistant's beginning."""

import pytest

from sleuth.data.render import OWN_KEYWORDS, PromptRenderer, opening_ids
from tests.data.tokenizers import with_bos
from tests.tiny_models import make_byte_bpe_tokenizer

TOKENIZER = make_byte_bpe_tokenizer()
USER = {"role": "user", "content": "q"}
WHERE = "row 3 of t.parquet, column 'prompt'"
# As some reasoning models do: an empty reasoning block before the assistant's last words.
EMPTY_THINK = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}"
    "[end]{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
OPENS_THINK = EMPTY_THINK.replace("<think></think>", "").replace("[assistant]", "[assistant]<think>")


def render(template: str, *messages: dict) -> str:
    tokenizer = make_byte_bpe_tokenizer()
    tokenizer.chat_template = template
    return tokenizer.decode(PromptRenderer(tokenizer, True).render(list(messages), where=WHERE))


@pytest.mark.parametrize("eos", [False, True])
def test_a_text_begins_as_the_tokenizer_begins_it_and_does_not_end(eos: bool) -> None:
    tokenizer = with_bos(TOKENIZER, eos=eos)
    renderer = PromptRenderer(tokenizer, False)
    plain = TOKENIZER.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [0, *plain] + [2] * eos
    assert renderer.render("hello") == [0, *plain]
    assert renderer.render("<|endoftext|>hello") == [0, *plain]
    assert PromptRenderer(TOKENIZER, False).render("hello") == plain
    assert opening_ids(TOKENIZER) == []


def test_a_template_puts_in_every_special_token_itself() -> None:
    expected = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    ids = PromptRenderer(with_bos(TOKENIZER), True).render([USER])
    assert TOKENIZER.decode(ids) == expected


def test_the_last_message_of_an_assistant_is_continued() -> None:
    template = TOKENIZER.chat_template
    head = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    for content in ("<think>", "<think>\nLet me", "so: "):
        assert render(template, USER, {"role": "assistant", "content": content}) == head + content
    assert render(OPENS_THINK, USER, {"role": "assistant", "content": "<think>"}) == "[user]q[end][assistant]<think>"


@pytest.mark.parametrize(
    ("template", "content"),
    [
        (EMPTY_THINK, "<think>"),
        (EMPTY_THINK.replace("{{ m.content }}", "{{ m.content | trim }}"), "so "),
        (OPENS_THINK, ""),
    ],
)
def test_an_assistants_beginning_that_the_template_changes_is_refused(template: str, content: str) -> None:
    with pytest.raises(ValueError, match=rf"{WHERE}: .*continue_final_message=True, add_generation_prompt=False"):
        render(template, USER, {"role": "assistant", "content": content})


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ raise_exception('roles must alternate') }}", "TemplateError: roles must alternate"),
        ("{{ messages[0].content + 1 }}", "TypeError: "),
        ("{{ messages[7].content }}", "UndefinedError: "),
        ("{% if %}", "TemplateSyntaxError: "),
        ("{{ 1 / 0 }}", "ZeroDivisionError: "),
    ],
)
def test_what_a_template_raises_names_row_and_column(template: str, told: str) -> None:
    with pytest.raises(ValueError, match=rf"{WHERE}: the chat template cannot render it: {told}"):
        render(template, USER)


def test_arguments_of_the_renderer_itself_are_refused() -> None:
    for name in OWN_KEYWORDS:
        with pytest.raises(ValueError, match=rf"--apply-chat-template-kwargs: .* found {name},"):
            PromptRenderer(TOKENIZER, True, {name: True})
    PromptRenderer(TOKENIZER, True, {"enable_thinking": False})
