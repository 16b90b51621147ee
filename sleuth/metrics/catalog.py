"""Every metric the project logs, with its unit and meaning; docs/metrics.md is made from this table.

A name may hold `<...>` where a run fills in its own word: `reward/<component>`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric's name as it is logged, its unit ("" for a plain number), and one phrase of what it says."""

    name: str
    unit: str
    meaning: str

    def matches(self, logged: str) -> bool:
        """Whether a logged name is of this metric."""
        pattern = re.sub(r"<[^>]*>", "\0", self.name)
        return re.fullmatch(re.escape(pattern).replace(re.escape("\0"), ".+"), logged) is not None


REWARD = (
    Metric("reward/mean", "", "mean reward of the step's training samples"),
    Metric("reward/std", "", "standard deviation of those rewards (population)"),
    Metric("reward/min", "", "lowest of those rewards"),
    Metric("reward/max", "", "highest of those rewards"),
    Metric("reward/exact_match", "share", "answers that equal an accepted answer after normalisation"),
    Metric("reward/valid_format", "share", "trajectories that keep the tag protocol"),
    Metric("reward/retrieval_hit", "share", "trajectories in which a retrieved passage holds an accepted answer"),
    Metric("reward/f1", "", "mean token F1 against the nearest accepted answer"),
    Metric("reward/overlong_penalty", "", "what overlong shaping adds, part of the reward (`--overlong-buffer-len`)"),
    Metric("reward/answered", "share", "trajectories that give an answer"),
    Metric("reward/<component>", "", "mean of any other component that the reward hook returns"),
)

ROLLOUT = (
    Metric("rollout/samples", "samples", "trajectories of the step"),
    Metric("rollout/groups", "groups", "prompts of the step"),
    Metric(
        "rollout/zero_variance_groups", "groups", "prompts whose samples all got the same reward: they teach nothing"
    ),
    Metric("rollout/failed_samples", "samples", "trajectories that the engine or the environment failed; replaced"),
    Metric("rollout/filtered_groups", "groups", "prompts that the dynamic sampling filter rejected; replaced"),
    Metric("rollout/overlong_samples", "samples", "trajectories that overlong shaping penalised"),
    Metric("rollout/prompt_length/mean", "tokens", "mean prompt length"),
    Metric("rollout/response_length/mean", "tokens", "mean response length, observations included"),
    Metric("rollout/response_length/max", "tokens", "longest response"),
    Metric("rollout/model_tokens", "tokens", "tokens that the model generated in the step (those with loss mask 1)"),
    Metric("rollout/observation_tokens", "tokens", "tokens that the environment put in: passages, corrections"),
    Metric("rollout/truncated", "share", "trajectories that a budget ended"),
    Metric(
        "rollout/status/<status>",
        "samples",
        "trajectories by status, replaced ones included: pending, completed, truncated, aborted, failed",
    ),
    Metric(
        "rollout/stop/<reason>",
        "share",
        "trajectories, replaced ones included, that ended for this reason: see the end of this page",
    ),
    Metric("rollout/searches", "searches", "mean searches of a trajectory"),
    Metric("rollout/turns", "turns", "mean generations of a trajectory"),
    Metric("rollout/tool_calls", "calls", "mean tool calls of a trajectory, wrong ones included (tool protocol)"),
    Metric("rollout/invalid_actions", "actions", "mean invalid actions of a trajectory"),
    Metric("rollout/observation_length", "tokens", "mean tokens of passages in a trajectory"),
    Metric("rollout/generation_seconds", "s", "mean time that a trajectory waits for the engine"),
    Metric("rollout/search_seconds", "s", "mean time that a trajectory waits for searches"),
    Metric("rollout/tokens", "tokens", "supervised training only: tokens of the step's trajectories"),
    Metric("rollout/weight_version/min", "", "oldest policy version among the samples"),
    Metric("rollout/weight_version/max", "", "newest policy version among the samples"),
    Metric("rollout/<name>", "", "mean of any other number that the generate hook puts into `Sample.rollout_metrics`"),
)

SEARCH = (
    Metric("search/requests", "searches", "searches of the step that reached the backend"),
    Metric("search/joined", "searches", "searches that waited for the same query under way"),
    Metric("search/cache_hits", "searches", "searches whose result was known"),
    Metric("search/success_rate", "share", "requests that were answered, after retries; so the rates below"),
    Metric("search/timeout_rate", "share", "requests that were not answered in time"),
    Metric("search/rate_limit_rate", "share", "requests that were refused with status 429"),
    Metric("search/connection_error_rate", "share", "requests that could not reach the backend"),
    Metric("search/status_error_rate", "share", "requests that were answered with another status than 200"),
    Metric("search/response_error_rate", "share", "requests whose answer was no list of passages"),
    Metric("search/backend_error_rate", "share", "requests in which a backend of the user's own raised an error"),
    Metric("search/refused_query_rate", "share", "requests whose query was refused, as one that is too long"),
    Metric("search/latency_p50", "s", "median time of a request, retries included"),
    Metric("search/latency_p95", "s", "95th percentile of that time"),
)

EVALUATION = (
    Metric("eval/<name>/em", "share", "exact match over the held-out questions"),
    Metric("eval/<name>/format", "share", "trajectories that keep the tag protocol"),
    Metric("eval/<name>/retrieval_hit", "share", "questions for which a passage with an accepted answer was retrieved"),
    Metric("eval/<name>/searches", "searches", "mean searches per question"),
    Metric("eval/<name>/reward", "", "mean reward"),
    Metric("eval/<name>/response_length", "tokens", "mean response length, observations included"),
    Metric("eval/<name>/truncated", "share", "trajectories that a budget ended"),
    Metric("eval/<name>/questions", "questions", "trajectories that count in the averages"),
    Metric("eval/<name>/failed", "samples", "trajectories that the engine or the environment failed; generated anew"),
    Metric("eval/<name>/source/<data source>/<measure>", "", "the same measure over one data source"),
    Metric("eval/<name>/macro/<measure>", "", "mean of the measure over data sources, each counting once"),
)

TRAINING = (
    Metric(
        "train/loss", "", "policy loss + KL loss - entropy bonus; in supervised training the smoothed cross-entropy"
    ),
    Metric("train/pg_loss", "", "policy-gradient part of the loss"),
    Metric("train/kl_loss", "nats", "KL estimate against the reference (`--kl-loss-type`), before its coefficient"),
    Metric("train/kl_penalty", "", "mean of what the KL penalty in the reward subtracts from a sample's (`--kl-coef`)"),
    Metric("train/entropy", "nats", "entropy of the policy"),
    Metric("train/clip_fraction", "share", "tokens whose ratio was clipped"),
    Metric("train/ratio_mean", "", "new over old probability"),
    Metric("train/ppo_kl", "nats", "old minus new log-probability: how far the step's updates moved the policy"),
    Metric("train/nll", "nats", "supervised training only: cross-entropy without smoothing"),
    Metric(
        "train/train_rollout_logprob_abs_diff",
        "nats",
        "trainer's against engine's log-probability, mean absolute difference over the step's samples",
    ),
    Metric(
        "train/rollout_logprob_abs_diff",
        "nats",
        "the same over a fixed probe right after the weight update, largest difference (`--max-logprob-diff`)",
    ),
    Metric("train/tis_weight_mean", "", "mean importance weight of the built-in correction (`--use-tis`)"),
    Metric("train/tis_clip_fraction", "share", "tokens whose importance weight was bounded"),
    Metric("train/grad_norm", "", "gradient norm before clipping"),
    Metric("train/lr", "", "learning rate"),
    Metric("train/tokens", "tokens", "tokens trained on in an optimizer step, mean over those of the step"),
    Metric("train/<name>", "", "any other number of the custom TIS hook whose name has no `/`"),
)

MISMATCH = (
    Metric(
        "mis/train_log_ppl",
        "nats",
        "minus the mean log-probability of a sample's tokens in the trainer; mean of samples",
    ),
    Metric("mis/rollout_log_ppl", "nats", "the same in the engine"),
    Metric("mis/train_ppl", "", "the trainer's perplexity: exp of the first, mean of samples"),
    Metric("mis/rollout_ppl", "", "the engine's perplexity"),
    Metric("mis/log_ppl_diff", "nats", "trainer's minus engine's log-perplexity, mean of samples"),
    Metric("mis/log_ppl_abs_diff", "nats", "its absolute value, mean of samples"),
    Metric("mis/log_ppl_diff_max", "nats", "the largest absolute value of a sample"),
    Metric(
        "mis/kl", "nats", "KL(engine || trainer), estimated by the mean of engine's minus trainer's log-probability"
    ),
    Metric("mis/k3", "nats", "the same by k3 (ratio - 1 - log ratio), which is never negative"),
    Metric("mis/log_chi2_token", "nats", "log(1 + chi-square divergence) of tokens: log of the mean squared ratio"),
    Metric("mis/log_chi2_sequence", "nats", "the same of whole samples, whose ratio is the product over tokens"),
    Metric("mis/chi2_token", "", "that divergence itself, with the logarithm bounded to 20"),
    Metric("mis/chi2_sequence", "", "that divergence itself, with the logarithm bounded to 20"),
    Metric("mis/tis_weight_before_bound", "", "mean weight as it comes"),
    Metric("mis/tis_weight_after_bound", "", "mean weight within the bounds (mode mask: of what is within)"),
    Metric("mis/tis_weight_mean", "", "mean weight that the loss sees: of what is kept, after normalisation"),
    Metric("mis/tis_weight_min", "", "smallest of those weights"),
    Metric("mis/tis_weight_max", "", "largest of those weights"),
    Metric("mis/tis_batch_norm", "", "what `tis_batch_normalize` divided the weights by"),
    Metric(
        "mis/effective_sample_size",
        "share",
        "(sum of weights)^2 / (their number x sum of squares); 1 where all are equal",
    ),
    Metric("mis/tis_truncate_fraction", "share", "tokens whose weight was above the upper bound (mode truncate)"),
    Metric("mis/tis_clip_fraction_low", "share", "tokens whose weight was below the lower bound (mode clip)"),
    Metric("mis/tis_clip_fraction_high", "share", "tokens whose weight was above the upper bound (mode clip)"),
    Metric("mis/tis_mask_fraction_low", "share", "tokens rejected for a weight below the lower bound (mode mask)"),
    Metric("mis/tis_mask_fraction_high", "share", "tokens rejected for a weight above the upper bound (mode mask)"),
    Metric("mis/rs_mask_fraction_low", "share", "tokens rejected by `use_rs` for a ratio below its lower bound"),
    Metric("mis/rs_mask_fraction_high", "share", "tokens rejected by `use_rs` for a ratio above its upper bound"),
    Metric("mis/veto_token_fraction", "share", "tokens whose ratio is below `rs_veto_threshold`"),
    Metric("mis/veto_sample_fraction", "share", "samples with such a token: all of it is rejected"),
    Metric("mis/rejected_token_fraction", "share", "tokens rejected for whatever reason"),
    Metric("mis/rejected_sample_fraction", "share", "samples of which no token is left"),
    Metric("mis/nonfinite_tokens", "tokens", "trainable tokens with a NaN or infinite log-probability on either side"),
    Metric(
        "mis/nonfinite_samples", "samples", "samples with such a token, all of it rejected and left out of the above"
    ),
)
"""Of the hook `mis.py`, in one optimizer step over all ranks. A mean weight is over tokens at level token and over
samples otherwise; fractions are of trainable tokens."""

TIME = (
    Metric(
        "time/<part>",
        "s",
        "seconds of a part: step (all but evaluation and saving), rollout, train, sync, evaluation, save; "
        "importance_sampling: of the TIS hook in one optimizer step, part of train",
    ),
    Metric("perf/rollout_tokens_per_second", "tokens/s", "tokens that the model generated over the rollout's seconds"),
    Metric("perf/<name>", "", "other throughput and memory numbers"),
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


def describe(name: str) -> Metric | None:
    """The catalogue's entry of a logged name, the most specific one first; None for an unknown name."""
    for metrics in CATALOG.values():
        for metric in metrics:
            if metric.matches(name):
                return metric
    return None
