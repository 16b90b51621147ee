"""A hook's own settings: from the class, its dictionary, files and flags; and what is said where they are wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import Field

from sleuth.arguments import Args, ArgumentsError, parse_args
from sleuth.cluster.preflight import with_hook_settings
from sleuth.hooks import Settings, SettingsPart, declared_settings, hook_modules, resolve_sections
from sleuth.hooks.settings import settings_of

HOOKS = """
from typing import Any
from pydantic import Field
from sleuth.hooks import Settings, SettingsPart


class Server(SettingsPart):
    url: str = "http://127.0.0.1:9000"
    retries: int = Field(2, ge=0)


class {name}Settings(Settings, section="{section}"{arguments}):
    strictness: float = Field(0.5, ge=0, le=1)
    words: list[str] = []
    server: Server = Server()


async def reward_func(args, sample, **kwargs):
    return {name}Settings.of(args).strictness
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    from sleuth.hooks import settings

    for name in ("judge", "tone"):
        settings._classes.pop(name, None)


def write_hooks(folder: Path, module: str, section: str = "judge", arguments: str = "", more: str = "") -> None:
    text = HOOKS.format(name=section.title(), section=section, arguments=arguments and f", {arguments}")
    (folder / f"{module}.py").write_text(text + more)


def parse(module: str, *files: str, flags: tuple[str, ...] = (), folder: Path) -> Args:
    """The settings of a run with `module`'s reward hook and configuration files of these texts."""
    paths = []
    for number, text in enumerate(files):
        (path := folder / f"config_{number}.yaml").write_text(text)
        paths += ["--custom-config-path", str(path)]
    base = ["--hf-checkpoint", "model", "--prompt-data", "train.parquet", "--colocate"]
    args = parse_args([*base, "--custom-rm-path", f"{module}.reward_func", *paths, *flags])
    return with_hook_settings(args, hook_modules(args))


def test_defaults_stand_beside_their_types(folder: Path):
    write_hooks(folder, "judge_a")
    section = parse("judge_a", folder=folder).custom_config["judge"]
    expected = {"strictness": 0.5, "words": [], "server": {"url": "http://127.0.0.1:9000", "retries": 2}}
    assert section == expected  # what config.yaml saves, too


def test_a_section_in_two_files_is_merged_key_by_key_and_the_later_file_wins(folder: Path):
    write_hooks(folder, "judge_b")
    first = "judge: {strictness: 0.1, words: [a, b], server: {url: 'http://x', retries: 5}}"
    second = "judge: {strictness: 0.9, words: [c], server: {retries: 0}}"
    section = parse("judge_b", first, second, folder=folder).custom_config["judge"]
    assert section == {"strictness": 0.9, "words": ["c"], "server": {"url": "http://x", "retries": 0}}


def test_two_sections_of_one_module(folder: Path):
    write_hooks(folder, "judge_c", more='\n\nclass Tone(Settings, section="tone"):\n    kind: str = "mild"\n')
    config = parse("judge_c", "judge: {strictness: 1}\ntone: {kind: harsh}", folder=folder).custom_config
    assert (config["judge"]["strictness"], config["tone"]["kind"]) == (1.0, "harsh")


def test_two_classes_of_one_section_in_one_module(folder: Path):
    write_hooks(folder, "judge_d", more='\n\nclass Second(Settings, section="judge"):\n    kind: str = "mild"\n')
    with pytest.raises(
        ValueError, match="judge_d: expected one class for the section judge, found JudgeSettings, Second"
    ):
        parse("judge_d", folder=folder)


def test_a_subclass_with_more_keys_takes_the_place_of_its_base(folder: Path):
    write_hooks(folder, "judge_e")
    (folder / "judge_f.py").write_text(
        "from judge_e import JudgeSettings, reward_func\n"
        "class MySettings(JudgeSettings):\n    extra: int = 3\n"
        "async def reward(args, sample, **kwargs):\n    return await reward_func(args, sample)\n"
    )
    import judge_e  # type: ignore[import-not-found]
    import judge_f  # type: ignore[import-not-found]

    assert settings_of(judge_f) == [judge_f.MySettings]
    args: Any = SimpleNamespace(custom_config={"judge": {"extra": 5, "strictness": 0.1}})
    assert judge_f.MySettings.of(args).extra == 5
    assert judge_e.JudgeSettings.of(args).strictness == 0.1  # the base takes the keys it knows
    sections = resolve_sections(args, declared_settings([judge_e, judge_f]))
    assert (sections["judge"]["extra"], sections["judge"]["strictness"]) == (5, 0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("jugde: {strictness: 1}", "unknown key jugde; did you mean judge?"),
        ("judge: {stricness: 1}", "judge: unknown key stricness; did you mean strictness? known are strictness, words"),
        ("judge: {server: {retires: 1}}", "unknown key server.retires; did you mean retries? known are url, retries"),
        ("judge: {strictness: high}", "judge: strictness: expected a valid number, found 'high'"),
        ("judge: {strictness: 2}", "strictness: expected less than or equal to 1, found 2"),
        ("judge: {strictness: .nan}", "strictness: expected a finite number"),
        ("judge: {server: here}", "server: expected a section of keys and values"),
        ("judge: {words: [1]}", "words.0: expected a valid string, found 1"),
        ("judge: [strictness]", "expected a mapping under judge:, found ['strictness']"),
        ("- judge", "expected a mapping of flags in"),
        ("strictness: 1", "unknown"),  # this section is not flat
        ("nowhere: {a: 1}", "the hooks that the flags name declare judge"),
    ],
)
def test_what_is_wrong_is_a_sentence(folder: Path, text: str, message: str):
    write_hooks(folder, "judge_g")
    with pytest.raises(ValueError, match=r".") as caught:
        parse("judge_g", text, folder=folder)
    assert message in str(caught.value)
    assert "pydantic" not in str(caught.value)


def test_keys_of_a_flat_section_may_stand_at_the_top_or_under_it_but_not_as_two_values(folder: Path):
    write_hooks(folder, "judge_h", arguments="flat=True")
    section = parse("judge_h", "strictness: 0.25\njudge: {words: [a]}", folder=folder).custom_config["judge"]
    assert (section["strictness"], section["words"]) == (0.25, ["a"])
    assert parse("judge_h", "strictness: 0.25\njudge: {strictness: 0.25}", folder=folder)
    with pytest.raises(ArgumentsError, match=r"strictness is given at the top level as 0.25 and under judge: as 0.75"):
        parse("judge_h", "strictness: 0.25\njudge: {strictness: 0.75}", folder=folder)


class TestFlags:
    """A key of a section that is a flag of the run, too."""

    def parse(self, folder: Path, *files: str, flags: tuple[str, ...] = ()) -> str:
        write_hooks(folder, "judge_i", arguments='flags={"search_url": "server.url"}')
        return parse("judge_i", *files, flags=flags, folder=folder).custom_config["judge"]["server"]["url"]

    def test_a_flag_on_the_command_line_outranks_the_section(self, folder: Path):
        flags = ("--search-url", "http://flag")
        assert self.parse(folder, "judge: {server: {url: 'http://file'}}", flags=flags) == "http://flag"
        assert self.parse(folder, flags=flags) == "http://flag"

    def test_a_flag_in_a_file_must_agree_with_the_section(self, folder: Path):
        assert self.parse(folder, "search_url: http://one\njudge: {server: {url: 'http://one'}}") == "http://one"
        with pytest.raises(
            ArgumentsError, match=r"--search-url is given as 'http://one' and under judge: as server.url"
        ):
            self.parse(folder, "search_url: http://one\njudge: {server: {url: 'http://two'}}")

    def test_a_flag_that_no_hook_reads_is_told(self, folder: Path):
        write_hooks(folder, "judge_j")
        with pytest.raises(ValueError, match="--search-url has no effect"):
            parse("judge_j", flags=("--search-url", "http://flag"), folder=folder)


class ToneSettings(Settings, section="tone"):
    """Its `defaults` are a dictionary, as users change them."""

    kind: str
    limit: int = Field(3, ge=1)

    @classmethod
    def defaults(cls) -> Mapping[str, Any]:
        return TONE


TONE: dict[str, Any] = {"kind": "mild"}


def args_with(**section: Any) -> Any:
    return SimpleNamespace(custom_config={"tone": section})


def test_ranks_class_then_defaults_then_file():
    assert (ToneSettings.of(args_with()).kind, ToneSettings.of(args_with()).limit) == ("mild", 3)
    assert ToneSettings.of(args_with(kind="harsh")).kind == "harsh"
    assert ToneSettings.of(SimpleNamespace()).kind == "mild"  # a test's arguments may have nothing


def test_a_change_of_the_dictionary_is_seen(monkeypatch: pytest.MonkeyPatch):
    assert ToneSettings.of(args_with()).kind == "mild"
    monkeypatch.setitem(TONE, "kind", "dry")
    assert ToneSettings.of(args_with()).kind == "dry"


def test_the_same_values_are_validated_once():
    args = args_with(limit=2)
    assert ToneSettings.of(args) is ToneSettings.of(args)
    args.custom_config["tone"]["limit"] = 4
    assert ToneSettings.of(args).limit == 4


def test_a_mapping_and_an_instance_are_taken_too():
    settings = ToneSettings.of({"limit": 9})
    assert (settings.kind, settings.limit) == ("mild", 9)
    assert ToneSettings.of(settings) is settings


def test_settings_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        ToneSettings.of(args_with()).limit = 4  # type: ignore[misc]


def test_a_value_of_a_key_that_may_be_secret_is_not_repeated():
    class Part(SettingsPart):
        api_key: int = 0

    class Secret(Settings, section="secret_test"):
        part: Part = Part()

    with pytest.raises(ValueError, match=r"part.api_key: expected a valid integer") as caught:
        Secret.of({"part": {"api_key": "s3cret"}})
    assert "s3cret" not in str(caught.value)
