"""Configuration files: what outranks what, sections of hooks, and errors that name expected, found and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.flags import TIS_HOOK, error_of, parse, write


def test_command_line_wins_over_yaml_wins_over_defaults(tmp_path: Path):
    path = write(tmp_path / "c.yaml", "lr: 1e-4\nadam-beta1: 0.8\nseed: 7\n")
    args = parse("--custom-config-path", path, "--seed", "8")
    assert (args.lr, args.adam_beta1, args.seed, args.adam_beta2) == (1e-4, 0.8, 8, 0.98)


def test_a_later_file_wins_and_sections_merge(tmp_path: Path):
    first = write(tmp_path / "a.yaml", "search_r1: {topk: 1, max_turns: 2}\nseed: 1\n")
    second = write(tmp_path / "b.yaml", "search_r1: {topk: 5}\nseed: 2\n")
    args = parse("--custom-config-path", first, second)
    assert args.custom_config == {"search_r1": {"topk": 5, "max_turns": 2}}
    assert args.seed == 2


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "+1e-4", "1e-04", "0.0001", "1.0e-4"])
def test_numbers_in_yaml_are_numbers_also_inside_sections(tmp_path: Path, text: str):
    args = parse("--custom-config-path", write(tmp_path / "c.yaml", f"lr: {text}\nsearch_r1: {{score: {text}}}\n"))
    assert args.lr == args.custom_config["search_r1"]["score"] == 1e-4


def test_keys_of_mis_yaml_go_to_the_hook(tmp_path: Path):
    path = write(tmp_path / "mis.yaml", "use_tis: true\ntis_level: token\nrs_veto_threshold: 1e-4\n")
    args = parse("--custom-config-path", path, *TIS_HOOK)
    assert args.use_tis
    assert args.custom_config == {"mis": {"tis_level": "token", "rs_veto_threshold": 1e-4}}


def test_null_in_mis_yaml_survives_writing_and_reading_back(tmp_path: Path):
    path = write(tmp_path / "mis.yaml", "use_rs: true\nrs_veto_threshold: null\n")
    args = parse("--custom-config-path", path, *TIS_HOOK)
    args.write(tmp_path / "config.yaml")
    assert parse("--custom-config-path", str(tmp_path / "config.yaml")).custom_config == args.custom_config


def test_a_section_whose_keys_are_all_commented_out_is_empty(tmp_path: Path):
    path = write(tmp_path / "c.yaml", "search_r1:\n  # topk: 5\nseed: 3\n")
    assert parse("--custom-config-path", path).custom_config == {"search_r1": {}}


def test_files_may_be_named_by_one_flag_or_several(tmp_path: Path):
    first, second = write(tmp_path / "a.yaml", "seed: 1\nlr: 1"), write(tmp_path / "b.yaml", "seed: 2")
    for words in ([first, "--custom-config-path", second], [first, second]):
        args = parse("--custom-config-path", *words)
        assert (args.seed, args.lr) == (2, 1.0)
        assert [str(path) for path in args.custom_config_path] == [first, second]


def test_null_means_the_default(tmp_path: Path):
    args = parse("--custom-config-path", write(tmp_path / "c.yaml", "global_batch_size:\nsave: null\n"))
    assert (args.global_batch_size, args.save) == (256, None)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("learning_rate_: 1\nrolout_batch_size: 3", ["rolout_batch_size: unknown", "did you mean rollout_batch_size?"]),
        ("serch_r1: {}", ["did you mean search_r1?"]),
        ("rs_level: token", ["rs_level: unknown", "declare search_r1", "needs the hook's flag"]),
        ("search_r1: 3", ["expected a mapping under search_r1:, found 3"]),
        ("custom_config: {}", ["custom_config: unknown"]),
        ("custom-config-path: x.yaml", ["cannot stand in a configuration file"]),
        ("seed: 1\nseed: 2", ["seed is given twice"]),
        ("lora_rank: 32", ["LoRA is not supported yet"]),
        ("- seed", ["expected a mapping of flags"]),
        ("seed: [", ["expected YAML in UTF-8, found", "; correct it"]),
        ("[" * 2000, ["expected YAML in UTF-8, found", "; correct it"]),
        ("lr: fast", ["--lr: expected a valid number", "found 'fast'"]),
        ("use_kl_loss: 17", ["--use-kl-loss: expected a valid boolean", "found 17"]),
        ("search_r1: {google: {api_key: abcd}}", ["search_r1.google.api_key", "use the environment"]),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, parts: list[str]):
    message = error_of("--custom-config-path", write(tmp_path / "c.yaml", text))
    assert all(part in message for part in parts), message


def test_a_file_that_is_no_utf8_is_named(tmp_path: Path):
    (tmp_path / "c.yaml").write_bytes(b"seed: 1 # \xff")
    assert f"expected YAML in UTF-8, found {tmp_path}/c.yaml" in error_of("--custom-config-path", f"{tmp_path}/c.yaml")


def test_a_section_may_be_built_on_another(tmp_path: Path):
    text = "custom: &base {topk: 5, max_turns: 4}\nsearch_r1: {<<: *base, topk: 7}\n"
    section = parse("--custom-config-path", write(tmp_path / "c.yaml", text)).custom_config["search_r1"]
    assert section == {"topk": 7, "max_turns": 4}


def test_a_missing_configuration_file_is_named():
    assert "found nowhere.yaml (No such file or directory)" in error_of("--custom-config-path", "nowhere.yaml")


def test_a_number_whose_name_ends_like_a_secret_is_none(tmp_path: Path):
    path = write(tmp_path / "c.yaml", "search_r1: {max_token: 5, api_key: null}\n")
    assert parse("--custom-config-path", path).custom_config["search_r1"]["max_token"] == 5


def test_the_name_of_an_environment_variable_is_no_secret(tmp_path: Path):
    path = write(tmp_path / "c.yaml", "search_r1: {google: {api_key: 'env:MY_KEY'}}\n")
    assert parse("--custom-config-path", path).custom_config["search_r1"]["google"] == {"api_key": "env:MY_KEY"}
