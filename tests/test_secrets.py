"""Secrets are masked in what is shown, and taken out of texts in which they turn up."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from generate_with_search import SearchSettings
from sleuth import secrets
from sleuth.arguments import ArgumentsError, config_table, parse_args
from sleuth.cluster.logs import configure_logging, failure_message
from sleuth.search import QueryError, SearchError
from sleuth.secrets import hide, masked, may_be_secret, redact, shown, without_passwords

PLANTED = "Pl4nted-hunter2"
URL = f"http://alice:{PLANTED}@10.0.0.7:8000/retrieve"
SECTIONS = f"""
search_url: {URL}
custom:
  auth: [alice, {PLANTED}1]
  credentials: {{user: alice, pin: {PLANTED}2}}
  key: {PLANTED}3
  judge: {{headers: {{x-api-key: {PLANTED}4}}, url: "https://h/score?access_token={PLANTED}5&top=3"}}
  number: {{pwd: 12345678}}
  proxy: "http://bob:{PLANTED}6@proxy:3128"
  sort_key: env:SORT_KEY
  max_token: 5
search_r1: {{local: {{proxy: "http://bob:{PLANTED}7@proxy:3128"}}}}
"""


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_known", set())


def arguments(tmp_path: Path, text: str = SECTIONS) -> Any:
    (tmp_path / "mine.yaml").write_text(text)
    return parse_args(
        [
            *("--hf-checkpoint", "model", "--prompt-data", "rows.jsonl", "--num-rollout", "1", "--colocate"),
            *("--custom-generate-function-path", "generate_with_search.generate"),
            *("--custom-rm-path", "generate_with_search.reward_func", "--rollout-num-gpus", "1", "--input-key", "q"),
            *("--custom-config-path", str(tmp_path / "mine.yaml")),
        ]
    )


def test_settings_are_masked_wherever_they_are_shown_and_whole_where_they_are_used(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(config_table(args))
    for text in (str(args.to_dict()), args.to_yaml(), console.export_text()):
        assert "Pl4nted" not in text
        assert "12345678" not in text
        assert "http://***@10.0.0.7:8000/retrieve" in text
        assert "http://***@proxy:3128" in text
    assert args.search_url == URL
    custom = args.custom_config["custom"]
    assert (custom["key"], custom["max_token"]) == (f"{PLANTED}3", 5)
    assert args.to_dict()["custom_config"]["custom"]["max_token"] == 5
    assert args.to_dict()["custom_config"]["custom"]["sort_key"] == "env:SORT_KEY"
    assert args.to_dict()["input_key"] == "q"  # a flag of that name is none


def test_a_masked_file_is_not_taken_for_the_settings(tmp_path: Path) -> None:
    text = f"{arguments(tmp_path).to_yaml()}"
    with pytest.raises(ArgumentsError, match=r"custom\.key: expected its value, found \*\*\*") as refused:
        arguments(tmp_path, text)
    for path in ("custom.auth", "custom.credentials.user", "custom.proxy", "custom.judge.url", "search_r1.local.proxy"):
        assert path in str(refused.value)


def test_messages_about_settings_do_not_repeat_secrets(tmp_path: Path) -> None:
    for text in (
        f"search_r1: {{local: {{search_url: '{URL}'}}}}\nsearch_url: http://u:{PLANTED}@other/x",
        f"custom: 'http://u:{PLANTED}@{'x' * 200}'",
        f"search_r1: {{local: {{search_url: 'ftp://u:{PLANTED}@{'x' * 100}'}}}}",
        f"search_url: [http://u:{PLANTED}@other/x]",
    ):
        with pytest.raises(ValueError, match=r"expected|keep one|unknown") as refused:
            SearchSettings.of(arguments(tmp_path, text))
        assert "Pl4nted" not in str(refused.value)


def test_what_hide_was_told_is_taken_out_of_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", f"{PLANTED}-environment")
    hide({"custom": {"auth": PLANTED, "mode": {"key": "question"}, "proxy": "http://bob:p%40ssw0rd@h:1"}})
    assert redact(f"a {PLANTED} and {PLANTED}-environment") == "a *** and ***"
    assert redact("user bob:p@ssw0rd, p%40ssw0rd") == "user bob:***, ***"
    assert redact("a question of the current folder") == "a question of the current folder"
    assert redact(str(Path.cwd())) == str(Path.cwd())


def test_logs_and_errors_of_searches_are_redacted(tmp_path: Path) -> None:
    hide({"auth": PLANTED})
    before = logging.getLogger().handlers[:]
    try:
        configure_logging(tmp_path, "driver")
        try:
            raise RuntimeError(f"401 for {PLANTED}")
        except RuntimeError as error:
            logging.getLogger("x").info("failed with %s", PLANTED, exc_info=error)
            told = failure_message(error, tmp_path)
    finally:
        for handler in set(logging.getLogger().handlers) - set(before):
            handler.close()
        logging.getLogger().handlers[:] = before
    text = (tmp_path / "logs/driver.log").read_text()
    assert text.count("RuntimeError: 401 for ***") == 2
    assert "Pl4nted" not in text + told
    assert str(SearchError(f"{URL}: no", "status")) == "http://***@10.0.0.7:8000/retrieve: no"
    refused = QueryError("no", PLANTED)
    assert refused.reason == "***"


@pytest.mark.parametrize(
    ("key", "secret"),
    [
        *((name, True) for name in ("auth", "X-Api-Key", "apiKey", "basic_auth", "credentials", "PASSWORD", "key")),
        *((name, False) for name in ("keys", "max_tokens", "author", "keyword", "monkey", "")),
    ],
)
def test_which_names_suggest_a_secret(key: str, secret: bool) -> None:
    assert may_be_secret(key) is secret


def test_urls_and_quotes_are_masked_before_they_are_cut() -> None:
    assert without_passwords("see http://a:b@h/x?q=1, https://t@h, me@mail.org") == (
        "see http://***@h/x?q=1, https://***@h, me@mail.org"
    )
    assert shown("http://" + "a" * 70 + ":b@h") == "'http://***@h'"
    assert masked({"auth": ["a", None, True]}) == {"auth": ["***", None, True]}
