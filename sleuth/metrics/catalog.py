"""Every metric the project logs, with its unit and meaning; docs/metrics.md is made from this table.

A name may hold `<...>` where a run fills in its own word: `reward/<component>`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric: the name it is logged under, its unit ("" for a plain number), and its meaning in one phrase.

    `alias` is the name that other systems have for it; it is logged under that, too.
    """

    name: str
    unit: str
    meaning: str
    alias: str = ""

    def matches(self, logged: str) -> bool:
        """Whether this metric is logged under the name `logged`."""
        pattern = re.sub(r"<[^>]*>", "\0", self.name)
        return re.fullmatch(re.escape(pattern).replace(re.escape("\0"), ".+"), logged) is not None


REWARD = (
    Metric("reward/mean", "", "mean reward of the step's training samples"),
    Metric("reward/std", "", "standard deviation (of a population) of the training samples' rewards"),
    Metric("reward/min", "", "lowest reward of the step's training samples"),
    Metric("reward/max", "", "highest reward of the step's training samples"),
    Metric(
        "reward/exact_match",
        "share",
        "trajectories whose answer equals an accepted answer after normalisation",
        alias="reward/correct",
    ),
    Metric("reward/valid_format", "share", "trajectories that keep the tag protocol"),
    Metric("reward/retrieval_hit", "share", "trajectories in which a retrieved passage holds an accepted answer"),
    Metric("reward/f1", "", "mean token F1 of the answer against the nearest accepted answer"),
    Metric(
        "reward/overlong_penalty", "", "mean penalty that overlong shaping adds to the reward (`--overlong-buffer-len`)"
    ),
    Metric("reward/answered", "share", "trajectories that give an answer"),
    Metric("reward/<component>", "", "mean of any other component that the reward hook returns"),
)

ROLLOUT = (
    Metric("rollout/samples", "samples", "trajectories that the step trains on"),
    Metric("rollout/groups", "groups", "prompts that the step trains on"),
    Metric(
        "rollout/zero_variance_groups", "groups", "prompts whose samples all got the same reward: they teach nothing"
    ),
    Metric("rollout/degenerate_group_rate", "share", "`rollout/zero_variance_groups` of `rollout/groups`"),
    Metric("rollout/groups_all_right", "groups", "prompts that every sample answered with an exact match"),
    Metric("rollout/groups_all_wrong", "groups", "prompts that no sample answered with an exact match"),
    Metric("rollout/repeated_prompts", "groups", "prompts that came before in the same step"),
    Metric("rollout/empty_labels", "groups", "prompts whose label holds no answer"),
    Metric(
        "rollout/failed_samples",
        "samples",
        "trajectories that failed in the engine, a hook or the environment, and were replaced",
    ),
    Metric(
        "rollout/filtered_groups",
        "groups",
        "prompts that `--dynamic-sampling-filter-path` rejected, and that were replaced",
    ),
    Metric(
        "rollout/from_journal",
        "samples",
        "samples that an interrupted run had finished, and that were not generated again (`--rollout-journal`)",
    ),
    Metric("rollout/overlong_samples", "samples", "trajectories that overlong shaping penalised"),
    Metric("rollout/prompt_length/mean", "tokens", "mean length of a prompt"),
    Metric("rollout/response_length/mean", "tokens", "mean length of a response, observations included"),
    Metric("rollout/response_length/max", "tokens", "length of the longest response, observations included"),
    Metric("rollout/model_tokens", "tokens", "tokens of the step that the model generated (loss mask 1)"),
    Metric(
        "rollout/observation_tokens",
        "tokens",
        "tokens of the step that the environment put in: passages, corrections",
    ),
    Metric("rollout/truncated", "share", "trajectories that a limit (of tokens, turns or invalid actions) ended"),
    Metric(
        "rollout/status/<status>",
        "samples",
        "trajectories by status, replaced ones included: pending, completed, truncated, aborted, failed",
    ),
    Metric(
        "rollout/stop/<reason>",
        "share",
        "trajectories, replaced ones included, that ended for this reason (docs/metrics.md lists the reasons)",
    ),
    Metric("rollout/searches", "searches", "mean number of searches in a trajectory", alias="rollout/search_calls"),
    Metric("rollout/turns", "turns", "mean number of generations in a trajectory"),
    Metric("rollout/tool_calls", "calls", "mean number of tool calls in a trajectory, wrong ones included"),
    Metric("rollout/visits", "pages", "mean number of web pages that a trajectory reads (tool `visit`)"),
    Metric(
        "rollout/drifted_tokens",
        "tokens",
        "mean number of tokens that a hook written for slime encoded anew, and that differ from the engine's",
    ),
    Metric("rollout/invalid_actions", "actions", "mean number of invalid actions in a trajectory"),
    Metric("rollout/observation_length", "tokens", "mean number of passage tokens in a trajectory"),
    Metric("rollout/generation_seconds", "s", "mean time that a trajectory waits for the engine"),
    Metric("rollout/search_seconds", "s", "mean time that a trajectory waits for searches"),
    Metric("rollout/tokens", "tokens", "tokens of the step's trajectories, prompts and observations included"),
    Metric("rollout/weight_version/min", "", "oldest version of the weights that a sample was generated with"),
    Metric("rollout/weight_version/max", "", "newest version of the weights that a sample was generated with"),
    Metric("rollout/<name>", "", "mean of any other number that the generate hook puts into `Sample.rollout_metrics`"),
)

SEARCH = (
    Metric("search/calls", "searches", "searches of the step: `search/requests`, `search/joined`, `search/cache_hits`"),
    Metric("search/requests", "searches", "searches of the step that reached the backend"),
    Metric("search/joined", "searches", "searches that shared the request of an equal query already under way"),
    Metric("search/cache_hits", "searches", "searches whose result was in the cache"),
    Metric("search/success_rate", "share", "requests that were answered, after retries"),
    Metric("search/error_rate", "share", "requests that failed, after retries; refused queries are no failures"),
    Metric("search/timeout_rate", "share", "requests that were not answered in time, after retries"),
    Metric("search/rate_limit_rate", "share", "requests that were refused with status 429, after retries"),
    Metric("search/connection_error_rate", "share", "requests that could not reach the backend, after retries"),
    Metric("search/status_error_rate", "share", "requests answered with a status other than 200, after retries"),
    Metric("search/response_error_rate", "share", "requests whose answer was not a list of passages, after retries"),
    Metric("search/backend_error_rate", "share", "requests in which a user's own backend raised an error"),
    Metric("search/refused_query_rate", "share", "requests whose query the backend refused, for example as too long"),
    Metric("search/latency_mean", "s", "mean time of a request, retries included", alias="search/latency"),
    Metric("search/latency_p50", "s", "median time of a request, retries included"),
    Metric("search/latency_p95", "s", "95th percentile of a request's time, retries included"),
    Metric("search/latency_max", "s", "longest time of a request, retries included"),
)

EVALUATION = (
    Metric("eval/<name>/em", "share", "held-out questions answered with an accepted answer (exact match)"),
    Metric("eval/<name>/format", "share", "evaluation trajectories that keep the tag protocol"),
    Metric("eval/<name>/retrieval_hit", "share", "questions for which a passage with an accepted answer was retrieved"),
    Metric("eval/<name>/searches", "searches", "mean number of searches for a question"),
    Metric("eval/<name>/reward", "", "mean reward of the evaluation's trajectories"),
    Metric("eval/<name>/response_length", "tokens", "mean length of an evaluation response, observations included"),
    Metric(
        "eval/<name>/truncated",
        "share",
        "evaluation trajectories that a limit (of tokens, turns or invalid actions) ended",
    ),
    Metric("eval/<name>/seconds", "s", "mean time of an evaluation trajectory, waits for engine and searches included"),
    Metric("eval/<name>/seconds_max", "s", "time of the evaluation's slowest trajectory"),
    Metric("eval/<name>/questions", "questions", "evaluation trajectories that count in the averages"),
    Metric(
        "eval/<name>/failed",
        "samples",
        "evaluation trajectories that failed in the engine, a hook or the environment, and were generated anew",
    ),
    Metric("eval/<name>/f1", "", "mean token F1 of the answer against the nearest accepted answer"),
    Metric("eval/<name>/answered", "share", "evaluation trajectories that give an answer"),
    Metric("eval/<name>/search/<measure>", "", "`search/<measure>` over the evaluation's searches alone"),
    Metric("eval/<name>/source/<data source>/<measure>", "", "`eval/<name>/<measure>` over one data source alone"),
    Metric(
        "eval/<name>/macro/<measure>", "", "mean of `eval/<name>/source/.../<measure>`: each data source counts once"
    ),
    Metric("eval/<name>/<component>", "", "mean of any other component that the reward hook returns"),
    Metric(
        "validation_reward/_mean",
        "",
        "mean of `eval/<name>/reward` over the sets and temperatures that were evaluated: what other systems call so",
    ),
)

TRAINING = (
    Metric(
        "train/loss", "", "policy loss + KL loss - entropy bonus; in supervised training the smoothed cross-entropy"
    ),
    Metric("train/pg_loss", "", "policy-gradient part of the loss"),
    Metric("train/kl_loss", "nats", "KL estimate against the reference (`--kl-loss-type`), without its coefficient"),
    Metric("train/kl_penalty", "", "mean amount that the KL penalty (`--kl-coef`) subtracts from a sample's reward"),
    Metric("train/entropy", "nats", "mean entropy of the policy at the trained tokens"),
    Metric("train/clip_fraction", "share", "tokens whose probability ratio (new policy over old) was clipped"),
    Metric("train/ratio_mean", "", "mean probability ratio of a token, new policy over old"),
    Metric(
        "train/ppo_kl",
        "nats",
        "mean of old minus new log-probability of a token: how far the step's updates moved the policy",
    ),
    Metric("train/nll", "nats", "cross-entropy without label smoothing (supervised training only)"),
    Metric(
        "train/train_rollout_logprob_abs_diff",
        "nats",
        "mean absolute difference between the trainer's and the engine's log-probability of a token of the step",
    ),
    Metric(
        "train/rollout_logprob_abs_diff",
        "nats",
        "largest difference between the trainer's and an engine's log-probabilities of a few fixed tokens (the probe), "
        "right after the weight update (`--max-logprob-diff`)",
    ),
    Metric("train/tis_weight_mean", "", "mean importance weight of the built-in correction (`--use-tis`)"),
    Metric("train/tis_clip_fraction", "share", "tokens whose importance weight was bounded by `--tis-clip`"),
    Metric("train/grad_norm", "", "norm of the gradient before clipping"),
    Metric("train/lr", "", "learning rate"),
    Metric("train/tokens", "tokens", "trained tokens of an optimizer step, mean over the optimizer steps of the step"),
    Metric(
        "train/loss_tokens",
        "tokens",
        "trained tokens of the step, without those that an importance-sampling hook rejects",
        alias="train/loss_tokens_per_rollout_batch",
    ),
    Metric("train/<name>", "", "any other number that the custom TIS hook returns under a name without `/`"),
)

MISMATCH = (
    Metric(
        "mis/train_log_ppl",
        "nats",
        "log-perplexity in the trainer: minus the mean log-probability of a sample's tokens; mean over samples",
    ),
    Metric(
        "mis/rollout_log_ppl",
        "nats",
        "log-perplexity in the engine: minus the mean log-probability of a sample's tokens; mean over samples",
    ),
    Metric("mis/train_ppl", "", "perplexity of a sample in the trainer, mean over samples"),
    Metric("mis/rollout_ppl", "", "perplexity of a sample in the engine, mean over samples"),
    Metric("mis/log_ppl_diff", "nats", "trainer's minus engine's log-perplexity of a sample, mean over samples"),
    Metric(
        "mis/log_ppl_abs_diff",
        "nats",
        "absolute difference of a sample's log-perplexity in trainer and engine, mean over samples",
    ),
    Metric(
        "mis/log_ppl_diff_max",
        "nats",
        "largest absolute difference of a sample's log-perplexity in trainer and engine",
    ),
    Metric(
        "mis/kl", "nats", "KL(engine || trainer), estimated by the mean of engine's minus trainer's log-probability"
    ),
    Metric(
        "mis/k3",
        "nats",
        "KL(engine || trainer), estimated by the mean of ratio - 1 - log(ratio); never negative",
    ),
    Metric("mis/log_chi2_token", "nats", "log(1 + chi-square divergence) of tokens: log of the mean squared ratio"),
    Metric(
        "mis/log_chi2_sequence",
        "nats",
        "log(1 + chi-square divergence) of samples: log of the mean squared product of a sample's ratios",
    ),
    Metric("mis/chi2_token", "", "chi-square divergence of tokens; its logarithm (`log_chi2_token`) bounded to 20"),
    Metric(
        "mis/chi2_sequence", "", "chi-square divergence of samples; its logarithm (`log_chi2_sequence`) bounded to 20"
    ),
    Metric("mis/tis_weight_before_bound", "", "mean importance weight before the bounds apply"),
    Metric(
        "mis/tis_weight_after_bound",
        "",
        "mean importance weight after the bounds applied (mode mask: of the weights within them)",
    ),
    Metric(
        "mis/tis_weight_mean", "", "mean importance weight in the loss: without rejected tokens, after normalisation"
    ),
    Metric("mis/tis_weight_min", "", "smallest importance weight in the loss"),
    Metric("mis/tis_weight_max", "", "largest importance weight in the loss"),
    Metric("mis/tis_batch_norm", "", "number that `tis_batch_normalize` divided the importance weights by"),
    Metric(
        "mis/effective_sample_size",
        "share",
        "(sum of importance weights)^2 / (their number x sum of their squares); 1 where all are equal",
    ),
    Metric("mis/tis_truncate_fraction", "share", "tokens whose weight was above the upper bound (mode truncate)"),
    Metric("mis/tis_clip_fraction_low", "share", "tokens whose weight was below the lower bound (mode clip)"),
    Metric("mis/tis_clip_fraction_high", "share", "tokens whose weight was above the upper bound (mode clip)"),
    Metric("mis/tis_mask_fraction_low", "share", "tokens rejected for a weight below the lower bound (mode mask)"),
    Metric("mis/tis_mask_fraction_high", "share", "tokens rejected for a weight above the upper bound (mode mask)"),
    Metric("mis/rs_mask_fraction_low", "share", "tokens rejected by `use_rs` for a ratio below `rs_lower_bound`"),
    Metric("mis/rs_mask_fraction_high", "share", "tokens rejected by `use_rs` for a ratio above `rs_upper_bound`"),
    Metric("mis/veto_token_fraction", "share", "tokens whose ratio is below `rs_veto_threshold`"),
    Metric(
        "mis/veto_sample_fraction",
        "share",
        "samples rejected as a whole for a token whose ratio is below `rs_veto_threshold`",
    ),
    Metric("mis/rejected_token_fraction", "share", "tokens rejected for any reason"),
    Metric("mis/rejected_sample_fraction", "share", "samples of which every token was rejected"),
    Metric(
        "mis/nonfinite_tokens",
        "tokens",
        "trainable tokens whose log-probability in trainer or engine is NaN or infinite",
    ),
    Metric(
        "mis/nonfinite_samples",
        "samples",
        "samples with a NaN or infinite log-probability; they are rejected as a whole and in no other `mis/` metric",
    ),
)
"""What the hook `mis.py` measures in one optimizer step, over all ranks. Mean weights are over tokens at level token,
and over samples at other levels; fractions are of trainable tokens."""

TIME = (
    Metric(
        "time/<part>",
        "s",
        "time of one part of the step. step: all but evaluation and saving; rollout, train, sync, evaluation, save "
        "(what the run waits for it); score: log-probabilities of the reference and of the policy before its "
        "updates, part of train; importance_sampling: the TIS hook in one optimizer step, part of train",
    ),
    Metric("perf/rollout_tokens_per_second", "tokens/s", "generated tokens of the step / seconds of its rollout"),
    Metric("perf/train_tokens_per_second", "tokens/s", "`rollout/tokens` / `time/train`"),
    Metric("perf/train_tokens_per_second_per_device", "tokens/s", "the same, divided by the trainer's devices"),
    Metric("perf/train_peak_tflops", "TFLOP/s", "what a GPU of the trainer can do at most in dense bfloat16, if known"),
    Metric(
        "perf/train_share_of_peak",
        "share",
        "operations of the model's forward and backward pass (no scoring, nothing recomputed) / `time/train`, of what "
        "the trainer's GPUs can do at most, if that is known",
    ),
    Metric(
        "perf/memory/<process>",
        "GB",
        "resident memory: driver, rollout, rollout_worker_<index>, trainer_<rank>, engine_<index> (all its processes; "
        "what they share counts for each)",
    ),
    Metric(
        "perf/gpu_memory/<process>", "GB", "memory in use on the process's GPUs, by whomever, at the end of its turn"
    ),
    Metric("perf/gpu_memory_peak/trainer_<rank>", "GB", "most memory that the rank's tensors took in the step"),
    Metric("perf/prefix_cache_share", "share", "tokens sent to the engines that their prefix caches held already"),
    Metric("perf/<name>", "", "any other number about throughput or memory"),
)

CATALOG: dict[str, tuple[Metric, ...]] = {
    "Reward": REWARD,
    "Rollout": ROLLOUT,
    "Search": SEARCH,
    "Evaluation": EVALUATION,
    "Training": TRAINING,
    "Mismatch of engine and trainer (the hook mis.py)": MISMATCH,
    "Time and throughput": TIME,
}


ALIASES = {metric.name: metric.alias for metrics in CATALOG.values() for metric in metrics if metric.alias}
"""The name that other systems have for a metric."""


def with_aliases(values: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a step, and again under the names that other systems have for them."""
    found = {alias: values[name] for name, alias in ALIASES.items() if name in values}
    rewards = [float(v) for name, v in values.items() if re.fullmatch(r"eval/.+/reward", name) and _is_whole(name)]
    if rewards:
        found["validation_reward/_mean"] = sum(rewards) / len(rewards)
    return {**values, **found}


def _is_whole(name: str) -> bool:
    """Whether an evaluation's metric is about all its questions."""
    return "/source/" not in name and "/macro/" not in name


def describe(name: str) -> Metric | None:
    """The first entry of the catalogue that matches a logged name (specific ones come first); None if there is none."""
    for metrics in CATALOG.values():
        for metric in metrics:
            if metric.matches(name):
                return metric
    return None
