"""The configuration beside what it names: the model's shape, its tokenizer, files and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sleuth.arguments import (
    ArgumentsError,
    check_files,
    check_model,
    check_tokenizer,
    model_flags,
    parse_args,
)
from sleuth.arguments.hf_config import Llama3Scaling, complete_config, rotary_scaling
from tests.flags import parse
from tests.published_configs import PUBLISHED


def test_model_flags_are_filled_in_from_the_config():
    args = check_model(parse(), PUBLISHED["qwen2.5-3B"])
    assert (args.num_layers, args.kv_channels, args.add_qkv_bias, args.qk_layernorm) == (36, 128, True, False)
    assert args.untie_embeddings_and_output_weights is False
    assert args.rollout_max_context_len == 32768
    assert (
        check_model(parse("--rollout-max-context-len", "512"), PUBLISHED["qwen2.5-3B"]).rollout_max_context_len == 512
    )


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--num-layers", "35"], ["--num-layers: the flag says 35", "says 36"]),
        (["--untie-embeddings-and-output-weights"], ["--untie-embeddings-and-output-weights", "True", "False"]),
        (["--norm-epsilon", "1e-5"], ["1e-05", "1e-06"]),
        (["--rotary-base", "10000"], ["10000.0", "1000000.0"]),
        (["--rollout-max-context-len", "99999"], ["at most the model's 32768 tokens, found 99999"]),
        (["--rollout-num-gpus", "3", "--rollout-num-gpus-per-engine", "3"], ["must divide --num-attention-heads 16"]),
    ],
)
def test_a_contradiction_with_the_config_names_both_values(flags: list[str], parts: list[str]):
    with pytest.raises(ArgumentsError) as caught:
        check_model(parse(*flags), PUBLISHED["qwen2.5-3B"])
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "found 'gpt2'"),
        ({"hidden_act": "gelu"}, "found 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention"] * 35 + ["sliding_attention"]}, "layer_types: .* found sliding_attention"),
        ({"attention_bias": True}, "attention_bias: expected false, found true"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1.0, found 0.5"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: .* the method 'fp8'"),
        ({"rms_norm_eps": "small"}, "transformers cannot read its config.json: .*rms_norm_eps"),
    ],
)
def test_models_that_are_not_supported_are_refused(change: dict[str, Any], message: str):
    with pytest.raises(ArgumentsError, match=message):
        check_model(parse(), {**PUBLISHED["qwen2.5-3B"], **change})


def test_scaling_in_one_section_counts_where_another_says_default():
    """Engines apply it: transformers merges both sections."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    change = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": scaling}
    with pytest.raises(ArgumentsError, match="rope type 'yarn'"):
        check_model(parse(), {**PUBLISHED["qwen2.5-3B"], **change})


def test_what_a_config_leaves_out_has_transformers_defaults():
    short = {name: value for name, value in PUBLISHED["qwen2.5-3B"].items() if "num" in name or "type" in name}
    args = check_model(parse(), short | {"hidden_size": 2048})
    assert (args.norm_epsilon, args.rotary_base, args.rollout_max_context_len) == (1e-6, 10000.0, 32768)
    assert args.untie_embeddings_and_output_weights is True
    assert model_flags({"model_type": "qwen3"})["kv_channels"] == 128
    assert model_flags({"model_type": "llama", "hidden_size": 256, "num_attention_heads": 4})["kv_channels"] == 64


def test_an_old_config_of_llama_3_is_understood():
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    old = {"model_type": "llama", "rope_theta": 5e5, "max_position_embeddings": 131072}
    config = complete_config(old | {"rope_scaling": scaling | {"original_max_position_embeddings": 8192}})
    assert rotary_scaling(config) == Llama3Scaling(32.0, 1.0, 4.0, 8192)
    assert model_flags(config)["rotary_base"] == 5e5
    assert rotary_scaling(complete_config(old)) is None


EIGHT = ("--actor-num-gpus-per-node", "8")


def test_a_mixture_of_experts_is_filled_in_from_either_spelling_of_its_config():
    config = PUBLISHED["qwen3-30B-A3B"]
    newer = {**config, "num_local_experts": config["num_experts"]}
    del newer["num_experts"]
    for spelling in (config, newer):
        args = check_model(parse(*EIGHT, "--expert-model-parallel-size", "8"), spelling)
        assert (args.num_experts, args.moe_router_topk, args.moe_ffn_hidden_size) == (128, 8, 768)
        assert (args.qk_layernorm, args.moe_router_pre_softmax) == (True, False)
    assert check_model(parse(), {**config, "norm_topk_prob": False}).moe_router_pre_softmax is True


@pytest.mark.parametrize(
    ("name", "flags", "change", "message"),
    [
        ("qwen2.5-3B", ["--num-experts", "8"], {}, "--num-experts: the flag says 8, .* says None"),
        ("qwen2.5-3B", ["--expert-model-parallel-size", "2"], {}, "expected 1 for a model without experts, found 2"),
        (
            "qwen3-30B-A3B",
            ["--expert-model-parallel-size", "8"],
            {"num_experts": 12},
            "nearest valid values are 6 and 12",
        ),
        ("qwen3-30B-A3B", ["--tensor-model-parallel-size", "2"], {}, "expected --sequence-parallel with it"),
        ("qwen3-30B-A3B", [], {"mlp_only_layers": [0]}, "expected experts in every layer"),
        ("qwen3-30B-A3B", [], {"num_experts": None}, "transformers cannot read .*num_experts"),
        (
            "qwen3-30B-A3B",
            ["--expert-tensor-parallel-size", "4"],
            {"moe_intermediate_size": 770},
            "--expert-tensor-parallel-size 4 must divide --moe-ffn-hidden-size 770",
        ),
    ],
)
def test_experts_that_do_not_fit_are_refused(name: str, flags: list[str], change: dict[str, Any], message: str):
    with pytest.raises(ArgumentsError, match=message):
        check_model(parse(*EIGHT, *flags), {**PUBLISHED[name], **change})


def test_the_layout_must_divide_the_models_vocabulary():
    layout = ("--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2")
    with pytest.raises(ArgumentsError, match="must divide --vocab-size 151937"):
        check_model(parse(*layout), {**PUBLISHED["qwen2.5-3B"], "vocab_size": 151937})


class Words:
    def __init__(self, largest: int) -> None:
        self.largest = largest

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "<last>": self.largest}


def test_a_tokenizer_with_more_ids_than_the_model_is_refused():
    check_tokenizer(Words(99), 100)
    with pytest.raises(ArgumentsError, match=r"below the model's vocab_size 100, found 100 \('<last>'\)"):
        check_tokenizer(Words(100), 100)


# --- files


def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_missing_files_are_all_named(tmp_path: Path):
    args = parse("--ref-load", str(tmp_path / "ref"), "--load", str(tmp_path / "x"), "--run-dir", str(tmp_path / "run"))
    with pytest.raises(ArgumentsError) as caught:
        check_files(args)
    for part in ("--hf-checkpoint", "--ref-load", "convert_hf_to_torch_dist.py", "--load", "--prompt-data"):
        assert part in str(caught.value)


def test_files_that_are_there_pass(tmp_path: Path):
    (tmp_path / "train.jsonl").write_text("{}\n")
    args = parse_args(
        [
            *("--hf-checkpoint", str(model_folder(tmp_path)), "--prompt-data", f"{tmp_path / 'train.jsonl'}@[0:5]"),
            *("--save", str(tmp_path / "ckpt"), "--load", str(tmp_path / "ckpt"), "--run-dir", str(tmp_path / "run")),
            *("--colocate", "--custom-rm-path", "h.r"),
        ]
    )
    check_files(args)


def test_a_checkpoint_itself_may_be_named(tmp_path: Path):
    (tmp_path / "train.jsonl").write_text("{}\n")
    one = tmp_path / "iter_0000005"
    one.mkdir()
    (one / "metadata.json").write_text("{}")
    files = ["--hf-checkpoint", str(model_folder(tmp_path)), "--prompt-data", str(tmp_path / "train.jsonl")]
    check_files(parse(*files, "--ref-load", str(one), "--load", str(one)))


def test_a_tracker_must_name_a_checkpoint_that_is_there(tmp_path: Path):
    (tmp_path / "train.jsonl").write_text("{}\n")
    saved = tmp_path / "saved"
    (saved / "iter_0000005").mkdir(parents=True)
    (saved / "iter_0000005/metadata.json").write_text("{}")
    files = ["--hf-checkpoint", str(model_folder(tmp_path)), "--prompt-data", str(tmp_path / "train.jsonl")]
    for text, found in (("", "found ''"), ("5x", "found '5x'"), ("7", "iter_0000007"), ("release", "release")):
        (saved / "latest_checkpointed_iteration.txt").write_text(text)
        for what in ("--ref-load", "--load"):
            with pytest.raises(ArgumentsError, match=f"{what}: expected .*{found}"):
                check_files(parse(*files, what, str(saved)))
    (saved / "latest_checkpointed_iteration.txt").write_text("5\n")
    check_files(parse(*files, "--ref-load", str(saved), "--load", str(saved)))


def test_a_new_run_does_not_replace_the_checkpoints_of_another(tmp_path: Path):
    (tmp_path / "train.jsonl").write_text("{}\n")
    saved = tmp_path / "saved"
    (saved / "iter_0000005").mkdir(parents=True)
    (saved / "iter_0000005/metadata.json").write_text("{}")
    (saved / "latest_checkpointed_iteration.txt").write_text("5")
    files = ["--hf-checkpoint", str(model_folder(tmp_path)), "--prompt-data", str(tmp_path / "train.jsonl")]
    with pytest.raises(ArgumentsError, match=f"--save: expected .* new run, .*; --load {saved} goes on from them"):
        check_files(parse(*files, "--save", str(saved)))
    check_files(parse(*files, "--save", str(saved), "--load", str(saved)))
    check_files(parse(*files, "--save", str(saved), "--load", str(saved / "iter_0000005")))


def test_the_advice_names_the_model_that_is_missing(tmp_path: Path):
    for name, advice in (("Qwen3-4B", "hf download Qwen/Qwen3-4B "), ("mine", "hf download OWNER/MODEL ")):
        with pytest.raises(ArgumentsError, match=advice):
            check_files(parse("--hf-checkpoint", str(tmp_path / name)))


def test_a_file_of_a_hub_data_set_is_not_sought_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path)
    check_files(parse("--prompt-data", "owner/repo/train.parquet@[0:5]"))
    (tmp_path / "owner").mkdir()
    with pytest.raises(ArgumentsError, match=r"found none at owner/repo/train\.parquet"):
        check_files(parse("--prompt-data", "owner/repo/train.parquet@[0:5]"))


def checkpoint(folder: Path, step: int, **description: Any) -> Path:
    """A folder of checkpoints with one, of which there is no more than what it says of itself."""
    one = folder / f"iter_{step:07d}"
    one.mkdir(parents=True)
    (one / "metadata.json").write_text("{}")
    (one / "sleuth.json").write_text(json.dumps({"step": step, **description}))
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
    return folder


def test_finetuning_starts_a_new_run_from_a_checkpoint_that_is_there(tmp_path: Path):
    (tmp_path / "train.jsonl").write_text("{}\n")
    saved, empty = checkpoint(tmp_path / "saved", 5, optimizer_steps=None), tmp_path / "empty"
    files = ["--hf-checkpoint", str(model_folder(tmp_path)), "--prompt-data", str(tmp_path / "train.jsonl")]
    check_files(parse(*files, "--finetune", "--load", str(saved), "--save", str(empty)))
    with pytest.raises(ArgumentsError, match=f"--load: expected a checkpoint .*, found none at {empty}"):
        check_files(parse(*files, "--finetune", "--load", str(empty), "--save", str(empty)))
    with pytest.raises(ArgumentsError, match=f"--save: expected .*; --load {saved} without --finetune goes on"):
        check_files(parse(*files, "--finetune", "--load", str(saved), "--save", str(saved)))


def test_a_checkpoint_that_training_cannot_go_on_from_is_told(tmp_path: Path):
    (tmp_path / "train.jsonl").write_text("{}\n")
    weights = checkpoint(tmp_path / "weights", 5, optimizer_steps=None)
    plain = checkpoint(tmp_path / "plain", 5, optimizer_steps=5, distributed_optimizer=False)
    files = ["--hf-checkpoint", str(model_folder(tmp_path)), "--prompt-data", str(tmp_path / "train.jsonl")]
    with pytest.raises(ArgumentsError, match=r"found weights without optimizer state; .* add --finetune"):
        check_files(parse(*files, "--load", str(weights)))
    check_files(parse(*files, "--load", str(plain)))
    torn = checkpoint(tmp_path / "torn", 5)
    (torn / "iter_0000005/sleuth.json").write_text('{"step"')
    with pytest.raises(
        ArgumentsError, match=r"--load: expected a JSON object in .*sleuth.json, .* copy the checkpoint"
    ):
        check_files(parse(*files, "--load", str(torn)))
    with pytest.raises(ArgumentsError, match=r"--use-distributed-optimizer is True, .* saved with False"):
        check_files(parse(*files, "--load", str(plain), "--use-distributed-optimizer"))
