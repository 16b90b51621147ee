"""The mismatch correction against a plain float64 formulation, sample by sample, for every combination of settings."""

from __future__ import annotations

import itertools
import logging
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from mis import MisSettings, check_args, compute_mis_weights, compute_mis_weights_with_cp
from sleuth.arguments import parse_args
from sleuth.hooks import check_hooks
from sleuth.metrics.catalog import MISMATCH

METRICS = {metric.name for metric in MISMATCH}

LEVELS = ("token", "sequence", "geometric")
COMBINATIONS = [
    {
        "use_tis": use_tis, "tis_level": level, "tis_mode": mode, "tis_batch_normalize": normalize,
        "use_rs": rs_level is not None, "rs_level": rs_level or "token", "rs_veto_threshold": veto,
    }
    for use_tis, level, mode, normalize, rs_level, veto in itertools.product(
        (True, False), LEVELS, ("truncate", "mask", "clip"), (True, False), (None, *LEVELS), (None, 0.3)
    )
    if use_tis or rs_level
]  # fmt: skip
BOUNDS = {"tis_upper_bound": 1.6, "rs_lower_bound": 0.4, "rs_upper_bound": 1.9}


def make_samples(count: int = 9, *, noise: float = 0.3, seed: int = 0) -> dict[str, list[torch.Tensor]]:
    """Ragged samples; one without a trainable token, one without any token, one off by a lot."""
    rng = torch.Generator().manual_seed(seed)
    samples: dict[str, list[torch.Tensor]] = {"train_log_probs": [], "rollout_log_probs": [], "loss_masks": []}
    for index in range(count):
        length = 0 if index == 3 else int(torch.randint(1, 12, (1,), generator=rng))
        mask = (torch.rand(length, generator=rng) > 0.3).float() * (index != 1)
        rollout = -torch.rand(length, generator=rng) * 3
        train = rollout + torch.randn(length, generator=rng) * (3.0 if index == 5 else noise)
        for name, values in zip(samples, (train, rollout, mask), strict=True):
            samples[name].append(values)
    return samples


def reference(settings: dict[str, Any], samples: dict[str, list[torch.Tensor]]) -> tuple[list, list, dict[str, float]]:
    """Weights, masks and some metrics in numpy, one sample and one token at a time."""
    upper = settings.get("tis_upper_bound", 2.0)
    lower = settings.get("tis_lower_bound") or 1 / upper
    low_rs, high_rs = settings.get("rs_lower_bound", lower), settings.get("rs_upper_bound", upper)
    weights, masks, fractions = [], [], {"rejected": 0, "tokens": 0}
    log_ratios = []
    for train, rollout, mask in zip(*(_numpy(values) for values in samples.values()), strict=True):
        on = mask != 0
        ratio = np.where(on, train - rollout, 0.0)
        log_ratios.append(ratio[on])
        total = {"token": ratio, "sequence": np.full_like(ratio, ratio.sum())}
        total["geometric"] = total["sequence"] / max(on.sum(), 1)
        keep, weight = on.copy(), np.ones_like(ratio)
        if settings["use_rs"]:
            value = np.exp(total[settings["rs_level"]])
            keep &= (value >= low_rs) & (value <= high_rs)
            veto = settings["rs_veto_threshold"]
            if veto is not None and (np.exp(ratio[on]) < veto).any():
                keep[:] = False
        if settings["use_tis"]:
            weight = np.exp(np.clip(total[settings["tis_level"]], -20, 20))
            if settings["tis_mode"] == "mask":
                keep &= (weight >= lower) & (weight <= upper)
            elif settings["tis_mode"] == "clip":
                weight = np.clip(weight, lower, upper)
            else:
                weight = np.minimum(weight, upper)
        weights.append(np.where(keep, weight, 0.0))
        masks.append(np.where(keep, mask, 0.0))
        fractions["tokens"] += int(on.sum())
        fractions["rejected"] += int(on.sum() - keep.sum())
    if settings["tis_batch_normalize"]:
        norm = _unit_mean(weights, masks, settings["tis_level"] if settings["use_tis"] else "token")
        weights = [weight / norm for weight in weights]
    every = np.concatenate(log_ratios)
    per_sample = np.array([values.sum() for values in log_ratios if len(values)])
    return weights, masks, {
        "rejected_token_fraction": fractions["rejected"] / fractions["tokens"],
        "kl": -every.mean(),
        "k3": (np.exp(every) - 1 - every).mean(),
        "log_chi2_token": np.log(np.exp(2 * every).mean()),
        "log_chi2_sequence": np.log(np.exp(2 * per_sample).mean()),
        "tis_weight_mean": _unit_mean(weights, masks, settings["tis_level"]),
    }  # fmt: skip


def _numpy(values: list[torch.Tensor]) -> list[np.ndarray]:
    return [value.double().numpy() for value in values]


def _unit_mean(weights: list[np.ndarray], masks: list[np.ndarray], level: str) -> float:
    """The mean weight: of kept tokens, or of samples that keep one."""
    kept = [weight[mask != 0] for weight, mask in zip(weights, masks, strict=True)]
    units = np.concatenate(kept) if level == "token" else np.array([values[0] for values in kept if len(values)])
    return float(units.mean()) if len(units) else 0.0


def assert_equals_reference(settings: dict[str, Any], samples: dict[str, list[torch.Tensor]]) -> None:
    weights, masks, metrics = compute_mis_weights(MisSettings(**settings), **samples)
    expected_weights, expected_masks, expected = reference(settings, samples)
    for found, wanted in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(found.numpy(), wanted, rtol=2e-6, atol=1e-9)
    for found, wanted in zip(masks, expected_masks, strict=True):
        np.testing.assert_array_equal(found.numpy(), wanted)
    for name, value in expected.items():
        if f"mis/{name}" in metrics:
            assert metrics[f"mis/{name}"] == pytest.approx(value, rel=1e-5, abs=1e-7), name
    assert set(metrics) <= METRICS


def test_every_combination_equals_a_plain_formulation() -> None:
    for settings in COMBINATIONS:
        for samples in (make_samples(), make_samples(noise=0.01, seed=1)):
            assert_equals_reference(settings | BOUNDS, samples)


def test_every_metric_is_logged_by_some_setting_and_described() -> None:
    logged: set[str] = set()
    for settings in COMBINATIONS:
        logged |= set(compute_mis_weights(MisSettings(**settings), **make_samples())[2])
    assert logged == METRICS


def test_perplexities_and_fractions_by_hand() -> None:
    train = [torch.log(torch.tensor([0.5, 0.2])), torch.log(torch.tensor([0.1, 0.4, 0.3]))]
    rollout = [torch.log(torch.tensor([0.25, 0.4])), torch.log(torch.tensor([0.1, 0.4, 0.1]))]
    masks = [torch.tensor([1, 1]), torch.tensor([0, 1, 1])]
    batch = {"train_log_probs": train, "rollout_log_probs": rollout, "loss_masks": masks}

    weights, kept, found = compute_mis_weights(MisSettings(use_tis=True, tis_upper_bound=2.5), **batch)
    assert [weight.tolist() for weight in weights] == [pytest.approx([2.0, 0.5]), pytest.approx([0.0, 1.0, 2.5])]
    assert [mask.tolist() for mask in kept] == [[1, 1], [0, 1, 1]]
    assert kept[0].dtype == torch.int64
    ppl = [1 / math.sqrt(0.5 * 0.2), 1 / math.sqrt(0.4 * 0.3)]
    assert found["mis/train_ppl"] == pytest.approx(sum(ppl) / 2)
    assert found["mis/train_log_ppl"] == pytest.approx((math.log(ppl[0]) + math.log(ppl[1])) / 2)
    difference = [0.0, -math.log(3) / 2]
    assert found["mis/log_ppl_diff"] == pytest.approx(sum(difference) / 2, abs=1e-7)
    assert found["mis/log_ppl_abs_diff"] == pytest.approx(abs(sum(difference)) / 2)
    assert found["mis/log_ppl_diff_max"] == pytest.approx(math.log(3) / 2)
    assert found["mis/tis_weight_before_bound"] == pytest.approx((2 + 0.5 + 1 + 3) / 4)
    assert found["mis/tis_weight_after_bound"] == pytest.approx((2 + 0.5 + 1 + 2.5) / 4)
    assert found["mis/tis_truncate_fraction"] == 0.25
    assert (found["mis/tis_weight_min"], found["mis/tis_weight_max"]) == (pytest.approx(0.5), pytest.approx(2.5))
    assert found["mis/effective_sample_size"] == pytest.approx(6**2 / (4 * (4 + 0.25 + 1 + 6.25)))
    assert found["mis/chi2_token"] == pytest.approx((4 + 0.25 + 1 + 9) / 4 - 1)
    assert found["mis/chi2_sequence"] == pytest.approx((1 + 9) / 2 - 1)

    _, kept, found = compute_mis_weights(MisSettings(use_rs=True, rs_veto_threshold=0.6, rs_lower_bound=0.4), **batch)
    assert [mask.tolist() for mask in kept] == [[0, 0], [0, 1, 0]]
    assert (found["mis/veto_token_fraction"], found["mis/veto_sample_fraction"]) == (0.25, 0.5)
    assert (found["mis/rs_mask_fraction_low"], found["mis/rs_mask_fraction_high"]) == (0.0, 0.5)
    assert (found["mis/rejected_token_fraction"], found["mis/rejected_sample_fraction"]) == (0.75, 0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_floating_type_is_taken(dtype: torch.dtype) -> None:
    samples = make_samples()
    for name in ("train_log_probs", "rollout_log_probs"):
        samples[name] = [values.to(dtype) for values in samples[name]]
    for settings in COMBINATIONS[::7]:
        assert_equals_reference(settings | BOUNDS, samples)
    weights, _, _ = compute_mis_weights(MisSettings(use_tis=True), **samples)
    assert all(weight.dtype == torch.float32 for weight in weights)


def test_log_probabilities_may_require_gradients() -> None:
    samples = make_samples()
    wanted, _, _ = compute_mis_weights({"use_tis": True, "use_rs": True}, **samples)
    for name in ("train_log_probs", "rollout_log_probs"):
        samples[name] = [values.clone().requires_grad_() for values in samples[name]]
    weights, _, _ = compute_mis_weights({"use_tis": True, "use_rs": True}, **samples)
    assert torch.equal(torch.cat(weights), torch.cat(wanted))
    assert not torch.cat(weights).requires_grad


@pytest.mark.parametrize("wrong", [torch.zeros(1, 3), torch.tensor(0.0), [0.0, 0.0, 0.0]])
@pytest.mark.parametrize("name", ["train_log_probs", "rollout_log_probs", "loss_masks"])
def test_what_is_not_a_row_a_sample_is_named(name: str, wrong: Any) -> None:
    samples: dict[str, Any] = {key: [torch.ones(3)] for key in make_samples()}
    with pytest.raises(ValueError, match=f"expected {name} as a list of 1-D tensors"):
        compute_mis_weights(MisSettings(use_tis=True), **samples | {name: [wrong]})


def test_half_precision_extremes_stay_finite() -> None:
    extremes = torch.tensor([-65504.0, 65504.0, 0.0], dtype=torch.float16)
    for settings in COMBINATIONS:
        weights, _, metrics = compute_mis_weights(
            MisSettings(**settings),
            train_log_probs=[extremes],
            rollout_log_probs=[-extremes],
            loss_masks=[torch.ones(3)],
        )
        assert all(weight.isfinite().all() for weight in weights)
        assert all(math.isfinite(value) for value in metrics.values())


def test_products_over_long_samples_are_bounded_in_the_exponent() -> None:
    train = [torch.full((4000,), -0.1), torch.full((4000,), -0.9)]
    batch = {"train_log_probs": train, "rollout_log_probs": train[::-1], "loss_masks": [torch.ones(4000)] * 2}
    config = MisSettings(use_tis=True, tis_level="sequence", tis_upper_bound=1e12)
    weights, _, metrics = compute_mis_weights(config, **batch)
    assert weights[0][0] == pytest.approx(math.exp(20.0), rel=1e-6)
    assert weights[1][0] == pytest.approx(math.exp(-20.0), rel=1e-6)
    assert metrics["mis/log_chi2_sequence"] == pytest.approx(6400 - math.log(2), rel=1e-5)
    assert metrics["mis/chi2_sequence"] == pytest.approx(math.expm1(20.0))


@pytest.mark.parametrize("settings", COMBINATIONS[::5])
def test_nothing_to_train_on(settings: dict[str, Any]) -> None:
    config = MisSettings(**settings)
    weights, masks, metrics = compute_mis_weights(config, train_log_probs=[], rollout_log_probs=[], loss_masks=[])
    assert (weights, masks) == ([], [])
    samples = make_samples()
    samples["loss_masks"] = [torch.zeros_like(mask) for mask in samples["loss_masks"]]
    weights, masks, same = compute_mis_weights(config, **samples)
    assert not any(part.any() for part in (*weights, *masks))
    assert same == metrics
    assert all(math.isfinite(value) for value in metrics.values())


BROKEN = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("value", BROKEN)
@pytest.mark.parametrize("side", ["train_log_probs", "rollout_log_probs"])
def test_a_broken_trainable_token_rejects_its_sample_alone(
    value: float, side: str, caplog: pytest.LogCaptureFixture
) -> None:
    samples = make_samples()
    without = {name: values[:] for name, values in samples.items()}
    without["loss_masks"][4] = torch.zeros_like(samples["loss_masks"][4])
    position = int(samples["loss_masks"][4].nonzero()[0])
    samples[side][4] = samples[side][4].clone().index_fill(0, torch.tensor([position]), value)
    for settings in COMBINATIONS[::3]:
        with caplog.at_level(logging.WARNING):
            weights, masks, metrics = compute_mis_weights(MisSettings(**settings), **samples)
        expected_weights, expected_masks, expected = compute_mis_weights(MisSettings(**settings), **without)
        assert all(torch.equal(a, b) for a, b in zip(weights + masks, expected_weights + expected_masks, strict=True))
        counts = {"mis/nonfinite_tokens": 1.0, "mis/nonfinite_samples": 1.0}
        assert metrics == expected | counts
    assert "1 trainable tokens of 1 samples" in caplog.text


def test_a_broken_trainable_token_stops_the_step_where_asked() -> None:
    samples = make_samples()
    samples["train_log_probs"][0] = samples["train_log_probs"][0] * float("nan")
    with pytest.raises(FloatingPointError, match=r"NaN or infinite.*mis_nonfinite: mask rejects such samples"):
        compute_mis_weights(MisSettings(use_tis=True, mis_nonfinite="stop"), **samples)


def test_when_every_sample_is_broken_the_step_stops() -> None:
    samples = make_samples()
    samples["train_log_probs"] = [values * float("nan") for values in samples["train_log_probs"]]
    with pytest.raises(FloatingPointError, match="no other sample"):
        compute_mis_weights(MisSettings(use_tis=True), **samples)


class Ranks:
    """`reduce` for two threads that stand for two ranks."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=30)
        self.sent: dict[int, torch.Tensor] = {}

    def reducer(self, rank: int) -> Any:
        def reduce(values: torch.Tensor, op: str = "sum") -> torch.Tensor:
            self.sent[rank] = values
            self.barrier.wait()
            parts = torch.stack([self.sent[0], self.sent[1]])
            self.barrier.wait()
            return parts.sum(0) if op == "sum" else parts.amax(0)

        return reduce


def test_statistics_are_completed_over_ranks() -> None:
    """Two ranks that hold parts of the samples compute what one with all of them does."""
    whole = make_samples()
    slices = (slice(0, 4), slice(4, None))
    with ThreadPoolExecutor(2) as pool:
        for settings in COMBINATIONS:
            config, ranks = MisSettings(**settings | BOUNDS), Ranks()
            runs = [
                pool.submit(
                    compute_mis_weights,
                    config,
                    **{name: values[part] for name, values in whole.items()},
                    reduce=ranks.reducer(rank),
                )
                for rank, part in enumerate(slices)
            ]
            weights, masks, metrics = compute_mis_weights(config, **whole)
            for run, part in zip(runs, slices, strict=True):
                some, kept, found = run.result()
                for a, b in zip(some + kept, weights[part] + masks[part], strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)
                assert found == pytest.approx(metrics, rel=1e-9, abs=1e-12)


def test_the_hook_multiplies_and_selects() -> None:
    samples = make_samples()
    lengths = [len(mask) for mask in samples["loss_masks"]]
    pg_loss = torch.linspace(1, 2, sum(lengths))
    pg_loss[torch.cat(samples["loss_masks"]) == 0] = float("nan")
    config = MisSettings(use_tis=True, tis_mode="mask")
    weights, expected, _ = compute_mis_weights(config, **samples)
    result, masks, _ = compute_mis_weights_with_cp(
        config, pg_loss=pg_loss, total_lengths=[n + 3 for n in lengths], response_lengths=lengths, **samples
    )
    kept = torch.cat(masks) != 0
    torch.testing.assert_close(result, torch.where(kept, pg_loss * torch.cat(weights), 0.0))
    assert result.isfinite().all()
    assert all(torch.equal(a, b) for a, b in zip(masks, expected, strict=True))


def test_the_hook_names_parts_of_samples() -> None:
    samples = make_samples()
    lengths = [2 * len(mask) for mask in samples["loss_masks"]]
    with pytest.raises(ValueError, match="expected whole responses"):
        compute_mis_weights_with_cp(
            MisSettings(use_tis=True), pg_loss=torch.ones(3), total_lengths=lengths, response_lengths=lengths, **samples
        )
    samples["train_log_probs"][0] = torch.zeros(99)
    with pytest.raises(ValueError, match="expected train_log_probs as long as loss_masks"):
        compute_mis_weights(MisSettings(use_tis=True), **samples)


def test_log_probabilities_are_written_where_asked(tmp_path: Path) -> None:
    samples = make_samples()
    lengths = [len(mask) for mask in samples["loss_masks"]]
    config = MisSettings(use_tis=True, mis_dump_dir=tmp_path / "new")
    for _ in range(2):
        compute_mis_weights_with_cp(
            config, pg_loss=torch.ones(sum(lengths)), total_lengths=lengths, response_lengths=lengths, **samples
        )
    files = sorted((tmp_path / "new").iterdir())
    assert [file.name for file in files] == ["rank000_000000.npz", "rank000_000001.npz"]
    kept = torch.cat(samples["loss_masks"]) != 0
    with np.load(files[1]) as data:
        np.testing.assert_array_equal(data["train"], torch.cat(samples["train_log_probs"])[kept].numpy())
        np.testing.assert_array_equal(data["rollout"], torch.cat(samples["rollout_log_probs"])[kept].numpy())
        assert data["sample"][-1] == 8


def test_what_requires_gradients_is_written_too_and_so_is_nothing(tmp_path: Path) -> None:
    config = MisSettings(use_tis=True, mis_dump_dir=tmp_path)
    row = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16, requires_grad=True)
    batch = {"train_log_probs": [row], "rollout_log_probs": [row], "loss_masks": [torch.tensor([0, 1])]}
    for lists, lengths in ((batch, [2]), ({name: [] for name in batch}, [])):
        compute_mis_weights_with_cp(
            config, pg_loss=torch.ones(sum(lengths)), total_lengths=lengths, response_lengths=lengths, **lists
        )
    written = [{name: data[name].tolist() for name in data} for data in map(np.load, sorted(tmp_path.iterdir()))]
    one = {"train": [-2.0], "rollout": [-2.0], "sample": [0]}
    assert written == [one, {"train": [], "rollout": [], "sample": []}]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_device_does_not_matter(tmp_path: Path) -> None:
    samples = make_samples()
    lengths = [len(mask) for mask in samples["loss_masks"]]
    for settings in COMBINATIONS:
        config = MisSettings(**settings | BOUNDS, mis_dump_dir=tmp_path)
        found = [
            compute_mis_weights_with_cp(
                config,
                pg_loss=torch.ones(sum(lengths), device=device),
                total_lengths=lengths,
                response_lengths=lengths,
                **{name: [row.to(device) for row in rows] for name, rows in samples.items()},
            )
            for device in ("cpu", "cuda")
        ]
        torch.testing.assert_close(found[1][0].cpu(), found[0][0])
        assert all(torch.equal(a, b.cpu()) for a, b in zip(found[0][1], found[1][1], strict=True))
        assert found[1][2] == pytest.approx(found[0][2], rel=1e-9, abs=1e-12)


# Settings


def test_defaults() -> None:
    config = MisSettings(use_tis=True)
    assert config.tis_bounds == config.rs_bounds == (0.5, 2.0)
    assert MisSettings(use_tis=True, tis_upper_bound=4.0).tis_bounds == (0.25, 4.0)
    assert MisSettings(use_rs=True, rs_upper_bound=3.0).rs_bounds == (0.5, 3.0)
    assert config.rs_veto_threshold == 1e-4
    assert (config.tis_level, config.tis_mode, config.rs_level) == ("token", "truncate", "token")


def test_mis_yaml_holds_the_defaults_of_every_key() -> None:
    shipped = yaml.safe_load(Path("mis.yaml").read_text(encoding="utf-8"))
    assert set(shipped) == set(MisSettings.model_fields)
    assert MisSettings(**shipped | {"rs_veto_threshold": 1e-4}) == MisSettings(use_tis=True, tis_lower_bound=0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "expected use_tis .or --use-tis. or use_rs, found neither"),
        (
            {"use_tis": True, "tis_level": "word"},
            "tis_level: expected 'token', 'sequence' or 'geometric', found 'word'",
        ),
        ({"use_tis": True, "tis_mode": "drop"}, "tis_mode: expected 'truncate', 'mask' or 'clip', found 'drop'"),
        ({"use_tis": True, "tis_upper_bound": 0.5}, "expected tis_lower_bound <= 1 <= tis_upper_bound"),
        ({"use_tis": True, "tis_lower_bound": 1.5}, "found 1.5 and 2; a ratio of 1"),
        ({"use_tis": True, "tis_upper_bound": -1}, "tis_upper_bound: .*greater than 0"),
        ({"use_tis": True, "tis_upper_bound": float("nan")}, "tis_upper_bound: "),
        ({"use_rs": True, "rs_lower_bound": 3.0}, "expected rs_lower_bound <= 1 <= rs_upper_bound"),
        ({"use_rs": True, "rs_veto_threshold": 2.0}, "rs_veto_threshold: .*less than 1"),
        ({"use_rs": True, "mis_nonfinite": "ignore"}, "mis_nonfinite: expected 'mask' or 'stop'"),
        ({"use_rs": "maybe"}, "use_rs: .*boolean"),
    ],
)
def test_what_is_refused_and_why(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_args(SimpleNamespace(**settings))


def test_a_step_without_a_sample_left_is_told(caplog: pytest.LogCaptureFixture) -> None:
    bounds = {"tis_lower_bound": 1.0, "tis_upper_bound": 1.0 + 1e-9}
    settings = {"use_tis": True, "tis_mode": "mask", "tis_batch_normalize": True} | bounds
    weights, _, found = compute_mis_weights(settings, **make_samples())
    assert found["mis/rejected_sample_fraction"] == 1.0
    assert torch.cat(weights).count_nonzero() == 0
    assert "every sample of this optimizer step is rejected" in caplog.text


def test_settings_may_be_a_mapping() -> None:
    assert MisSettings.of({"use_tis": True}) == MisSettings(use_tis=True)
    with pytest.raises(ValueError, match="unknown key tis_levle; did you mean tis_level"):
        MisSettings.of({"use_tis": True, "tis_levle": "token"})


def test_a_folder_for_dumps_must_be_one_that_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check_args(SimpleNamespace(use_tis=True, mis_dump_dir=tmp_path / "new/folder"))
    with pytest.raises(ValueError, match=f"mis_dump_dir: expected a folder .*, found {tmp_path / 'file'}; choose"):
        check_args(SimpleNamespace(use_tis=True, mis_dump_dir=tmp_path / "file"))


def test_unbounded_weights_are_allowed() -> None:
    config = MisSettings(use_tis=True, tis_upper_bound=math.inf)
    assert config.tis_bounds == (0.0, math.inf)
    weights, _, _ = compute_mis_weights(config, **make_samples())
    assert torch.cat(weights).isfinite().all()


BASE = [
    "--hf-checkpoint",
    "m",
    "--prompt-data",
    "d",
    "--colocate",
    "--custom-rm-path",
    "generate_with_search.reward_func",
]
HOOK = ["--custom-tis-function-path", "mis.compute_mis_weights_with_cp"]


def test_settings_come_from_the_file_and_the_flag(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("use_tis: true\ntis_level: sequence\nrs_veto_threshold: 1e-4\ntis_upper_bound: 5\n")
    args = parse_args([*BASE, "--custom-config-path", "mis.yaml", str(path), *HOOK])
    config = MisSettings.of(args)
    assert config == MisSettings(use_tis=True, tis_level="sequence", tis_lower_bound=0.5, tis_upper_bound=5.0)
    rejection = tmp_path / "rs.yaml"
    rejection.write_text("use_rs: true\n")
    args = parse_args([*BASE, "--custom-config-path", "mis.yaml", str(rejection), "--no-use-tis", *HOOK])
    assert MisSettings.of(args) == MisSettings(use_rs=True, tis_lower_bound=0.5)


def test_wrong_settings_are_refused_before_a_run_starts(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("tis_mode: drop\n")
    args = parse_args([*BASE, "--use-tis", "--custom-config-path", str(path), *HOOK])
    with pytest.raises(ValueError, match=r"mis: tis_mode: expected .*, found 'drop'"):
        check_hooks(args.model_copy(update={"custom_rm_path": None}))
    with pytest.raises(ValueError, match=r"name their hook with .*--custom-tis-function-path, or leave them out"):
        parse_args([*BASE, "--use-tis", "--custom-config-path", "mis.yaml"])
