"""How texts become words: stems, stop words, and pairs of characters where a script has no spaces."""

from __future__ import annotations

import pytest

from local_dense_retriever.words import Words, languages


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The capitals of France, a 2nd time", ["capit", "franc", "2nd", "time"]),
        ("中国的首都", ["中国", "国的", "的首", "首都"]),
        ("猫", ["猫"]),
        ("Apple的iPhone手机 rocks", ["appl", "的", "iphon", "手机", "rock"]),
        ("ＮＨＫ ﾃﾚﾋﾞ", ["nhk", "テレ", "レビ"]),  # wide and narrow forms
        ("เมือง", ["เมื", "มือ", "อง"]),  # a vowel sign stays with its letter
        ("수도는", ["수도", "도는"]),
        ("cafe\u0301s", ["café"]),
        ("हिन्दी", ["हिन्दी"]),  # vowel signs do not cut a word
        ("", []),
        ("。、！", []),
    ],
)
def test_the_words_of_a_query(text: str, words: list[str]) -> None:
    assert Words().of_queries([text]) == [words]


def test_a_passage_keeps_single_characters_too() -> None:
    tokens = Words("none").of_passages(["首都", "the cat"])
    names = {number: word for word, number in tokens.vocab.items()}
    assert [{names[number] for number in text} for text in tokens.ids] == [{"首", "都", "首都"}, {"the", "cat"}]


@pytest.mark.parametrize(
    ("language", "words"),
    [
        ("english", ["die", "häuser"]),
        ("german", ["haus"]),
        ("none", ["die", "häuser"]),
        ("chinese", ["die", "häuser"]),  # stop words alone
        ("hindi", ["die", "häuser"]),  # a stemmer alone
    ],
)
def test_stems_and_stop_words_are_the_languages(language: str, words: list[str]) -> None:
    assert Words(language).of_queries(["die Häuser"]) == [words]


def test_an_unknown_language_names_the_choices() -> None:
    with pytest.raises(ValueError, match=r"found 'English', expected one of: arabic, .*english, .*none"):
        Words("English")
    assert {"english", "chinese", "korean", "tamil", "none"} <= set(languages())
    assert "porter" not in languages()
    for language in languages():
        assert Words(language).of_queries(["xyzzy"]) != [[]]
