"""The configuration: defaults, kinds of values, and errors that name expected, found and remedy."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from sleuth.arguments import (
    Args,
    ArgumentsError,
    CheckpointArgs,
    Group,
    ModelArgs,
    build_parser,
    changes,
    config_table,
    parse_args,
    parse_args_or_exit,
)
from sleuth.arguments.checks import nearest_divisors
from sleuth.arguments.neighbours import SAME_AS, UNSUPPORTED
from tests.flags import BASE, error_of, parse, write

# Every flag that the 8-GPU script of the field and this project's interfaces name.
FLAGS = """\
--hf-checkpoint --ref-load --load --save --save-interval --prompt-data --input-key --label-key --apply-chat-template
--rollout-shuffle --num-rollout --rollout-batch-size --n-samples-per-prompt --rollout-max-response-len
--rollout-max-context-len --rollout-temperature --rollout-top-p --rollout-stop --eval-interval --eval-prompt-data
--eval-input-key --eval-label-key --n-samples-per-eval-prompt --global-batch-size --balance-data --micro-batch-size
--use-dynamic-batch-size --max-tokens-per-gpu --tensor-model-parallel-size --sequence-parallel
--pipeline-model-parallel-size --context-parallel-size --expert-model-parallel-size --expert-tensor-parallel-size
--recompute-granularity --recompute-method --recompute-num-layers --advantage-estimator --use-kl-loss --kl-loss-coef
--kl-loss-type --entropy-coef --eps-clip --eps-clip-high --use-tis --optimizer --lr --lr-decay-style --weight-decay
--adam-beta1 --adam-beta2 --clip-grad --use-wandb --use-tensorboard --rollout-num-gpus --rollout-num-gpus-per-engine
--sglang-mem-fraction-static --actor-num-nodes --actor-num-gpus-per-node --colocate --attention-dropout --hidden-dropout
--accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 --attention-backend --custom-generate-function-path
--custom-rm-path --custom-config-path --custom-tis-function-path --seed --loss-type --label-smoothing --dtype --run-dir
--save-keep --eval-temperature --eval-max-response-len --rollout-max-concurrency --sglang-max-total-tokens
--sglang-dtype --lr-warmup-steps --lr-decay-steps --min-lr --adam-eps --max-logprob-diff --calculate-per-token-loss
--disable-grpo-std-normalization --eps-clip-c --tis-clip --tis-clip-low --log-trajectories
--dynamic-sampling-filter-path --cpu-threads-per-actor --wandb-project --wandb-group --eval-before-train --ray-address
--max-failure-rate --data-source-filter --metadata-key --tool-key --apply-chat-template-kwargs --rollout-top-k
--eval-top-p --log-probs-chunk-size --use-distributed-optimizer --swiglu --num-layers --hidden-size --ffn-hidden-size
--num-attention-heads --use-rotary-position-embeddings --disable-bias-linear --add-qkv-bias --normalization
--norm-epsilon --rotary-base --group-query-attention --num-query-groups --vocab-size --kv-channels --qk-layernorm
--untie-embeddings-and-output-weights --num-experts --moe-router-topk --moe-ffn-hidden-size
--moe-router-pre-softmax --kl-coef --kl-penalty-type --overlong-buffer-len --overlong-penalty-factor
--score-old-log-probs --num-layers-per-virtual-pipeline-stage
"""


def test_every_flag_is_known_documented_and_nothing_undocumented_is_reachable():
    actions = {flag: action for action in build_parser()._actions for flag in action.option_strings}
    assert set(FLAGS.split()) <= set(actions)
    assert all(action.help for action in actions.values())
    assert "--custom-config" not in actions


def test_help_lists_groups_and_defaults(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        parse_args(["--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    assert "\nOptimizer:\n" in text
    assert "Learning rate, after warm-up. [1e-06]" in text
    assert "Undefined" not in text


def test_defaults_that_follow_from_other_settings():
    args = parse("--actor-num-gpus-per-node", "4", "--rollout-max-response-len", "99", "--input-key", "question")
    assert args.global_batch_size == args.samples_per_step == 32 * 8
    assert args.rollout_num_gpus == 4
    assert args.lr_decay_steps == args.num_rollout
    assert (args.eval_max_response_len, args.eval_input_key, args.eval_label_key) == (99, "question", "reward_model")
    assert args.run_dir.parent == Path("runs")


def test_decay_covers_every_optimizer_step_of_the_run():
    args = parse("--global-batch-size", "64", "--num-rollout", "10")
    assert (args.optimizer_steps_per_step, args.lr_decay_steps) == (4, 40)


def test_weights_by_broadcast_need_engines_of_their_own():
    through = ("--update-weights-through", "distributed")
    assert "leave out --colocate" in error_of(*through)
    assert parse(*through, "--no-colocate", "--rollout-num-gpus", "2").update_weights_through == "distributed"


def test_sizes_of_a_colocated_run():
    layout = ["--actor-num-gpus-per-node", "4", "--tensor-model-parallel-size", "2"]
    args = parse(*layout, "--rollout-num-gpus", "4", "--rollout-num-gpus-per-engine", "2")
    assert (args.actor_world_size, args.data_parallel_size, args.num_engines, args.total_gpus) == (4, 2, 2, 4)
    apart = parse_args([*BASE, *layout, "--rollout-num-gpus", "4", "--no-colocate"])
    assert (apart.num_engines, apart.total_gpus) == (4, 8)
    assert parse("--actor-num-gpus-per-node", "4", "--rollout-num-gpus", "2", "--debug-rollout-only").total_gpus == 2


def test_supervised_training_needs_neither_engines_nor_reward():
    args = parse_args(["--hf-checkpoint", "m", "--prompt-data", "d.jsonl", "--loss-type", "sft"])
    assert (args.n_samples_per_prompt, args.samples_per_step, args.num_engines, args.total_gpus) == (1, 32, 0, 1)


def test_lists_json_and_pairs():
    args = parse(
        *("--eval-interval", "5", "--eval-prompt-data", "nq", "a.parquet@[0:30]", "hotpot", "b.parquet"),
        *("--eval-temperature", "0", "1", "--rollout-stop", "</a>", "\n"),
        *(
            "--apply-chat-template",
            "--apply-chat-template-kwargs",
            '{"enable_thinking": false}',
            "--no-eval-before-train",
        ),
    )
    assert args.eval_sets == {"nq": "a.parquet@[0:30]", "hotpot": "b.parquet"}
    assert args.eval_temperature == [0.0, 1.0]
    assert args.rollout_stop == ["</a>", "\n"]
    assert args.apply_chat_template_kwargs == {"enable_thinking": False}
    assert args.eval_before_train is False


# --- errors


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--rolout-batch-size", "3"], ["--rolout-batch-size: unknown; did you mean --rollout-batch-size?"]),
        (["--learning-rate", "1"], ["--learning-rate: unknown; did you mean --lr?"]),
        (["--max-steps", "1"], ["did you mean --num-rollout?"]),
        (["--questions-per-batch", "1"], ["did you mean --rollout-batch-size?"]),
        (["--group-size", "1"], ["did you mean --n-samples-per-prompt?"]),
        (["--num-generations", "1"], ["did you mean --n-samples-per-prompt?"]),
        (["--save-every", "1"], ["did you mean --save-interval?"]),
        (["--base-model", "1"], ["did you mean --hf-checkpoint?"]),
        (["--lr-warmup-iters", "1"], ["did you mean --lr-warmup-steps?"]),
        (["--keep-latest-k", "1"], ["did you mean --save-keep?"]),
        (["--banana-split", "1"], ["--banana-split: unknown; see --help"]),
        (["--xyzzyq", "3"], ["--xyzzyq: unknown; see --help"]),
        (["--rollout-batch", "3"], ["--rollout-batch: unknown"]),
        (["stray"], ["found stray"]),
        (["--lr"], ["--lr", "expected one argument"]),
        (["--lr", "abc"], ["--lr: expected a valid number", "found 'abc'"]),
        (["--lr", "nan"], ["--lr: expected a finite number"]),
        (["--num-rollout", "0"], ["--num-rollout: expected greater than 0", "found '0'"]),
        (["--rollout-temperature", "0"], ["--rollout-temperature"]),
        (["--optimizer", "sgd"], ["--optimizer: expected 'adam', found 'sgd'"]),
        (["--advantage-estimator", "ppo"], ["expected 'grpo', 'gspo'", "found 'ppo'"]),
        (["--apply-chat-template-kwargs", "{a"], ["expected a JSON object", "found '{a'"]),
        (["--partial-rollout"], ["partial rollouts are not supported yet"]),
        (["--lora-rank", "32"], ["LoRA is not supported yet"]),
        (["--wandb-key", "k"], ["WANDB_API_KEY"]),
        (
            ["--expert-model-parallel-size", "2"],
            ["expert x expert-tensor x pipeline parallelism = 2 x 1 x 1 = 2 must divide the 1 training GPUs"],
        ),
        (["--kl-coef", "0.01"], ["--kl-coef needs the frozen reference", "or drop --kl-coef"]),
        (["--overlong-penalty-factor", "2"], ["no effect without --overlong-buffer-len", "or drop --overlong-pen"]),
        (
            ["--kl-loss-coef", "0.001"],
            ["--kl-loss-coef has no effect without --use-kl-loss; add --use-kl-loss, or drop"],
        ),
        (["--kl-loss-type", "k3"], ["--kl-loss-type has no effect without --use-kl-loss"]),
        (["--kl-penalty-type", "k2"], ["--kl-penalty-type has no effect without --kl-coef; add --kl-coef, or drop"]),
        (["--finetune"], ["--finetune has no effect without --load; add --load, or drop --finetune"]),
        (["--save-interval", "5"], ["--save-interval has no effect without --save"]),
        (["--save-keep", "5"], ["--save-keep has no effect without --save"]),
        (["--tool-key", "tools"], ["--tool-key has no effect without --apply-chat-template"]),
        (["--apply-chat-template-kwargs", '{"a": 1}'], ["has no effect without --apply-chat-template"]),
        (["--n-samples-per-eval-prompt", "4"], ["has no effect without --eval-interval"]),
        (["--eval-max-response-len", "99"], ["has no effect without --eval-interval"]),
        (["--eval-interval", "5", "--eval-prompt-data", *"ax", "--eval-top-p", "0.9"], ["--eval-temperature 0 alone"]),
        (["--wandb-project", "x"], ["--wandb-project has no effect without --use-wandb"]),
        (["--min-lr", "1e-7"], ["--min-lr has no effect without --lr-decay-style linear or cosine"]),
        (["--lr-decay-steps", "5"], ["--lr-decay-steps has no effect without --lr-decay-style"]),
        (
            ["--disable-grpo-std-normalization", "--advantage-estimator", "importance_sampling"],
            ["only with --advantage-estimator grpo, gspo, cispo"],
        ),
        (["--eps-clip-c", "3", "--advantage-estimator", "cispo"], ["--eps-clip-c has no effect with"]),
        (["--loss-type", "sft", "--entropy-coef", "0.1"], ["--entropy-coef has no effect with --loss-type sft"]),
        (["--overlong-buffer-len", "600"], ["--overlong-buffer-len <= --rollout-max-response-len", "600 > 512"]),
        (
            [
                "--actor-num-gpus-per-node",
                "2",
                "--pipeline-model-parallel-size",
                "2",
                "--num-layers-per-virtual-pipeline-stage",
                "2",
            ],
            ["--pipeline-model-parallel-size of 3 or more, found 2"],
        ),
        (
            [
                "--actor-num-gpus-per-node",
                "4",
                "--pipeline-model-parallel-size",
                "4",
                "--num-layers",
                "36",
                "--num-layers-per-virtual-pipeline-stage",
                "2",
            ],
            ["4 x --num-layers-per-virtual-pipeline-stage 2 must divide --num-layers 36"],
        ),
        (["--attention-dropout", "0.1"], ["expected 0", "found 0.1"]),
        (["--no-attention-softmax-in-fp32"], ["--no-attention-softmax-in-fp32: not supported"]),
        (["--sequence-parallel"], ["needs --tensor-model-parallel-size above 1"]),
        (
            ["--overlap-param-gather"],
            ["--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce; add them"],
        ),
        (
            ["--overlap-param-gather", "--use-distributed-optimizer"],
            ["--overlap-param-gather needs --overlap-grad-reduce; add it"],
        ),
        (["--tensor-model-parallel-size", "3"], ["3 x 1 x 1 = 3 must divide the 1 training GPUs"]),
        (["--rollout-num-gpus", "3", "--rollout-num-gpus-per-engine", "2"], ["3 must be a multiple", "2"]),
        (["--no-colocate"], ["expected --colocate", "or --rollout-num-gpus"]),
        (["--global-batch-size", "100"], ["100 must divide the 256 samples", "64 and 128"]),
        (["--micro-batch-size", "3"], ["must divide the 256 samples", "2 and 4"]),
        (["--use-dynamic-batch-size", "--micro-batch-size", "2"], ["no effect with --use-dynamic-batch-size"]),
        (["--max-tokens-per-gpu", "100"], ["no effect without --use-dynamic-batch-size"]),
        (["--recompute-granularity", "full"], ["needs --recompute-method", "--recompute-method uniform"]),
        (["--recompute-method", "uniform"], ["only with --recompute-granularity full"]),
        (["--n-samples-per-prompt", "1"], ["a group of one has no advantage"]),
        (["--use-kl-loss"], ["--use-kl-loss needs the frozen reference", "--ref-load"]),
        (["--use-tis", "--rejected-in-denominator"], ["no effect without --custom-tis-function-path"]),
        (["--label-smoothing", "0.1"], ["only with --loss-type sft"]),
        (["--loss-type", "sft", "--use-tis"], ["--use-tis has no effect with --loss-type sft"]),
        (["--loss-type", "sft", "--debug-rollout-only"], ["--debug-rollout-only: supervised training has no rollouts"]),
        (["--loss-type", "sft", "--n-samples-per-prompt", "4"], ["expected --n-samples-per-prompt 1, found 4"]),
        (["--min-lr", "1"], ["expected --min-lr <= --lr"]),
        (["--rollout-top-k", "0"], ["--rollout-top-k: expected -1 or at least 1, found '0'"]),
        (["--tis-clip", "1", "--tis-clip-low", "2"], ["expected --tis-clip-low <= --tis-clip"]),
        (["--tis-clip", "3"], ["--tis-clip has no effect without --use-tis"]),
        (["--eval-interval", "5"], ["add --eval-prompt-data NAME PATH"]),
        (["--eval-prompt-data", "nq", "x"], ["add --eval-interval"]),
        (["--eval-interval", "5", "--eval-prompt-data", "nq"], ["expected pairs NAME PATH, found 1 words"]),
        (["--eval-interval", "5", "--eval-prompt-data", *"axay"], ["a different name for each set"]),
        (
            ["--eval-interval", "5", "--eval-prompt-data", "a/b", "x", "a_b", "y"],
            ["--eval-prompt-data: expected names of letters", "found a/b: metrics", "rename the set"],
        ),
        (["--prompt-data", "x@[0-3]"], ["expected a slice path@[a:b]", "x@[0-3]"]),
        (["--num-query-groups", "2", "--no-group-query-attention"], ["needs --group-query-attention"]),
    ],
)
def test_what_is_wrong_is_named_with_a_remedy(flags: list[str], parts: list[str]):
    message = error_of(*flags)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    "flags",
    [
        ["--no-use-kl-loss", "--kl-loss-coef", "0.01"],  # turned off by name, after the flags of a script
        ["--kl-loss-coef", "0", "--entropy-coef", "0", "--kl-coef", "0"],
        ["--kl-coef", "0", "--kl-penalty-type", "k2"],
        ["--min-lr", "0", "--no-finetune", "--no-eval-before-train", "--save-keep", "0"],
        ["--eps-clip", "0.2", "--eps-clip-high", "0.28", "--advantage-estimator", "importance_sampling"],
        ["--eval-interval", "5", "--eval-prompt-data", "nq-test_2.1", "x", "--eval-temperature", "0", "1"],
        ["--load", "x", "--finetune", "--save", "y", "--save-interval", "5", "--no-save-on-exit"],
    ],
)
def test_what_is_off_or_has_its_switch_is_accepted(flags: list[str]):
    parse(*flags)


def test_all_values_of_another_run_are_accepted_from_its_file(tmp_path: Path):
    parse("--num-rollout", "7").write(tmp_path / "config.yaml")
    again = parse("--custom-config-path", str(tmp_path / "config.yaml"), "--num-rollout", "9", "--save", "x")
    assert (again.num_rollout, again.lr_decay_steps, again.save_on_exit) == (9, 7, True)
    (tmp_path / "kl.yaml").write_text("kl_loss_coef: 0.01")
    assert "--kl-loss-coef has no effect" in error_of("--custom-config-path", str(tmp_path / "kl.yaml"))


def test_the_batch_must_divide_over_ranks_and_valid_values_are_offered():
    ranks = ["--actor-num-gpus-per-node", "4", "--rollout-batch-size", "9"]
    assert "must be a multiple of the data-parallel size 4" in error_of(*ranks, "--global-batch-size", "18")
    assert "are 12 and 24" in error_of(*ranks, "--global-batch-size", "18")
    assert "no value fits" in error_of("--actor-num-gpus-per-node", "5")


def test_the_layout_must_divide_the_models_heads():
    layout = ["--actor-num-gpus-per-node", "4", "--tensor-model-parallel-size", "4"]
    assert "must divide --num-query-groups 2" in error_of(*layout, "--num-query-groups", "2")


def test_all_problems_are_listed_at_once():
    message = error_of("--global-batch-size", "100", "--use-kl-loss", "--hidden-dropout", "0.5")
    assert message.startswith("3 wrong arguments\n")
    message = error_of("--lr", "x", "--seed", "y")
    assert "--lr" in message
    assert "--seed" in message


def test_what_is_required_is_named():
    with pytest.raises(ArgumentsError, match="--hf-checkpoint is required: Folder of the"):
        parse_args([])
    with pytest.raises(ArgumentsError, match="--custom-rm-path is required"):
        parse_args(BASE[:-2])


def test_scripts_exit_with_the_message(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        parse_args_or_exit([*BASE, "--lr", "x"])
    assert stopped.value.code == 2
    assert "--lr: expected" in capsys.readouterr().err


def test_nearest_divisors():
    assert nearest_divisors(256, 100) == [64, 128]
    assert nearest_divisors(256, 300) == [256]
    assert nearest_divisors(72, 18, multiple_of=4) == [12, 24]


# --- the object


def test_it_is_frozen_and_refuses_unknown_names():
    args = parse()
    with pytest.raises(ValueError, match="frozen"):
        args.lr = 1.0
    with pytest.raises(ValueError, match="Extra inputs"):
        Args(hf_checkpoint="m", prompt_data="p", colocate=True, custom_rm_path="h.r", nonsense=1)  # type: ignore[call-arg]


def test_it_can_be_written_and_read_back(tmp_path: Path):
    source = write(tmp_path / "c.yaml", "search_r1: {topk: 1}\n")
    args = parse("--custom-config-path", source, "--lr", "3e-5", "--save", "ckpt", "--rollout-stop", "</x>")
    args.write(tmp_path / "resolved.yaml")
    again = parse_args(["--custom-config-path", str(tmp_path / "resolved.yaml")])
    keep = {"custom_config_path"}
    assert again.model_dump(exclude=keep) == args.model_dump(exclude=keep)


def test_to_dict_is_json_and_holds_no_secret(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_API_KEY", "very-secret")
    args = parse("--use-wandb", "--save", "x")
    assert "very-secret" not in json.dumps(args.to_dict()) + args.to_yaml()
    assert args.to_dict()["save"] == "x"
    assert yaml.safe_load(args.to_yaml())["lr"] == 1e-6


def test_the_table_shows_groups_and_marks_what_was_given():
    def text(only_changed: bool) -> str:
        console = Console(width=120)
        with console.capture() as capture:
            console.print(config_table(parse("--lr", "3e-5"), only_changed=only_changed))
        return capture.get()

    assert "--adam-beta2" in text(False)
    assert "Optimizer" in text(True)
    assert "named as module.function\n" in re.sub(" +\n", "\n", text(False))
    assert "3e-05" in text(True)
    assert "--adam-beta2" not in text(True)


def test_only_what_differs_from_the_defaults_is_shown():
    def shown(args: Args, **sections: dict[str, object]) -> str:
        console = Console(width=120)
        with console.capture() as capture:
            console.print(config_table(args, only_changed=True, default_sections=sections))
        return capture.get()

    said = shown(parse("--lr", "1e-6", "--rollout-batch-size", "16", "--save", "x"))
    assert "--rollout-batch-size" in said
    assert "--save " in said
    for name in ("--lr", "--global-batch-size", "--rollout-num-gpus", "--adam-beta2", "Optimizer"):
        assert name not in said  # given, but the default; or computed from what was given
    args = parse().model_copy(update={"custom_config": {"s": {"topk": 5, "turns": 2, "local": {"url": "a"}}}})
    said = shown(args, s={"topk": 3, "turns": 2, "local": {"url": "a"}})
    assert re.findall(r"(topk|turns|local)", said) == ["topk"]


def test_what_changed_between_two_configurations():
    before, after = (yaml.safe_load(parse(*flags).to_yaml()) for flags in (("--save", "a"), ("--lr", "2e-6")))
    after["search_r1"] = {"topk": 3}
    found = changes(before, after)
    assert found == ["--save a -> -", "--lr 1e-06 -> 2e-06", "search_r1.topk - -> 3"]
    assert changes(before, {**before, "run_dir": "elsewhere"}) == []


def test_an_evaluation_alone_needs_no_training_data():
    base = ["--hf-checkpoint", "m", "--custom-rm-path", "a.b", "--colocate", "--eval-only"]
    args = parse_args([*base, "--eval-prompt-data", "t", "t.jsonl@[0:5]", "--eval-temperature", "0", "1"])
    assert args.prompt_data == "t.jsonl@[0:5]"
    assert not args.trains
    assert args.total_gpus == args.num_engines == 1
    for flags, message in (
        ([], "--eval-only needs evaluation sets"),
        (["--eval-prompt-data", "t", "t.jsonl", "--debug-rollout-only"], "--eval-only with --debug-rollout-only"),
    ):
        with pytest.raises(ArgumentsError, match=message):
            parse_args([*base, "--prompt-data", "p.jsonl", *flags])
    with pytest.raises(ArgumentsError, match=r"--eval-only needs evaluation sets; add") as error:
        parse_args(base)
    assert "--prompt-data is required" not in str(error.value)


def test_names_of_related_systems_lead_to_flags_that_there_are():
    assert set(SAME_AS.values()) <= set(Args.model_fields)
    assert not set(SAME_AS) & (set(Args.model_fields) | set(UNSUPPORTED))


def test_tools_compose_only_the_groups_they_need():
    class ConvertOptions(Group):
        """Conversion"""

        force: bool = False

    class ConvertArgs(ConvertOptions, ModelArgs, CheckpointArgs):
        pass

    args = parse_args(["--hf-checkpoint", "m", "--save", "out", "--num-layers", "3", "--force"], model=ConvertArgs)
    assert (args.num_layers, args.force, args.save) == (3, True, Path("out"))
    with pytest.raises(ArgumentsError, match="--lr: unknown"):
        parse_args(["--hf-checkpoint", "m", "--lr", "1"], model=ConvertArgs)
