"""scripts/models/*.sh as the shell reads them, as the plan reads them, and against what the models publish."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sleuth.arguments import ArgumentsError, ModelArgs, model_flags, parse_args
from sleuth.arguments.model_scripts import FOLDER, known_model, known_models, read_model_script
from tests.published_configs import PUBLISHED


def sourced(name: str) -> tuple[list[str], int]:
    """MODEL_ARGS and MAX_POSITION_EMBEDDINGS, as a script that sources the file gets them."""
    command = f'source "{FOLDER}/{name}.sh"; printf "%s\\n" "${{MODEL_ARGS[@]}}" "$MAX_POSITION_EMBEDDINGS"'
    *words, context = subprocess.check_output(["bash", "-c", command], text=True).splitlines()
    return words, int(context)


@pytest.mark.parametrize("name", known_models())
def test_the_plan_knows_what_the_script_gives_to_a_run(name: str):
    words, context = sourced(name)
    given = parse_args(words, model=ModelArgs).model_dump(exclude_none=True)
    known = read_model_script(FOLDER / f"{name}.sh")
    assert len(given) > 12
    assert given == {flag: known.shape[flag] for flag in given}
    assert (known.context, known.script) == (context, f"scripts/models/{name}.sh")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_script_says_what_the_models_config_says(name: str):
    known = read_model_script(FOLDER / f"{name}.sh")
    assert known.shape == model_flags(PUBLISHED[name])
    assert known.context == PUBLISHED[name]["max_position_embeddings"]


def test_a_model_is_found_by_the_name_of_its_folder():
    instruct, small = known_model("/models/Qwen2.5-3B-Instruct"), known_model("Qwen3-0.6B")
    assert instruct is not None
    assert small is not None
    assert (instruct.script, small.script) == ("scripts/models/qwen2.5-3B.sh", "scripts/models/qwen3-0.6B.sh")
    assert known_model("Qwen2.5-32B") is None


SIZES = "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --vocab-size 96"


def script(tmp_path: Path, body: str) -> Path:
    path = tmp_path / "mine.sh"
    path.write_text(body, encoding="utf-8")
    return path


def test_comments_quotes_and_what_is_left_out(tmp_path: Path):
    path = script(tmp_path, f"# mine\nMODEL_ARGS=(\n    {SIZES}  # small\n    --rotary-base '5000'\n)\n")
    known = read_model_script(path)
    assert known.context is None
    assert (known.shape["rotary_base"], known.shape["kv_channels"], known.shape["num_query_groups"]) == (5000.0, 8, 4)
    assert (known.shape["group_query_attention"], known.shape["qk_layernorm"]) == (False, False)
    assert (known.shape["num_experts"], known.shape["moe_router_pre_softmax"]) == (None, None)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ARGS=(\n--num-layers 2\n)\n", r"mine\.sh: expected MODEL_ARGS=\("),
        ("MODEL_ARGS=(\n--num-layer 2\n)\n", r"mine\.sh: (?s:.*)did you mean --num-layers\?"),
        ("MODEL_ARGS=(\n--num-layers '2\n)\n", r"mine\.sh: No closing quotation"),
        ("MODEL_ARGS=(\n--num-layers 2\n)\n", r"mine\.sh: expected --hidden-size, .*--vocab-size in MODEL_ARGS"),
    ],
)
def test_a_script_that_makes_no_model_is_refused(tmp_path: Path, body: str, message: str):
    with pytest.raises(ArgumentsError, match=message):
        read_model_script(script(tmp_path, body))
