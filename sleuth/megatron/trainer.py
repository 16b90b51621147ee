"""The trainer: an object on each rank that trains, scores, returns the weights, and saves checkpoints.

    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    trainer = Trainer(args)
    metrics = trainer.train(steps)      # list[OptimizerStepBatch], this rank's share
    trainer.save(1, rollout_state)

Every public method is collective: all ranks call it together.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor
from torch.distributed import Store

from sleuth.algo.context_parallel import length_multiple
from sleuth.algo.optimizer_steps import OptimizerStepBatch
from sleuth.megatron import device, parallel
from sleuth.megatron.checkpoint import Checkpoints, load_weights
from sleuth.megatron.finite import ruined_weights
from sleuth.megatron.forward import MicroBatch, finalize_gradients, run_model, score
from sleuth.megatron.kl_penalty import PenaltySettings, penalise
from sleuth.megatron.lending import LentMemory
from sleuth.megatron.logprobs import HeadOptions
from sleuth.megatron.model import (
    ModelSettings,
    ModelShape,
    build_model,
    resolve_dtype,
    transformer_config,
)
from sleuth.megatron.newest_checkpoint import NewestCheckpoint
from sleuth.megatron.objectives import (
    CorrectionSettings,
    ImportanceSampling,
    ObjectiveSettings,
    head_options,
    make_objective,
)
from sleuth.megatron.optimizer import OptimizerSettings, PolicyOptimizer
from sleuth.megatron.parallel import ProcessSettings
from sleuth.megatron.reference import Reference
from sleuth.megatron.weights import WeightMap, load_hf_weights
from sleuth.metrics.progress import Counter
from sleuth.metrics.timing import timed
from sleuth.sample import TrainSample

logger = logging.getLogger(__name__)


class TrainerSettings(
    ProcessSettings,
    ModelSettings,
    OptimizerSettings,
    ObjectiveSettings,
    CorrectionSettings,
    PenaltySettings,
    Protocol,
):
    """The arguments that the trainer and its parts read; `Args` has all of them."""

    hf_checkpoint: str
    ref_load: Path | None
    load: Path | None
    save: Path | None
    save_keep: int
    async_save: bool
    finetune: bool
    verify: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    score_old_log_probs: bool


class Trainer:
    """One rank of the trainer.

    `steps_done` is how many steps the loaded checkpoint had done (0 in a new run), `rollout_state` what was
    saved with it ({} in a new run).
    """

    def __init__(self, args: TrainerSettings, store: Store | None = None) -> None:
        """`store` is where the ranks meet; without one they meet at MASTER_ADDR and MASTER_PORT."""
        self.args = args
        self.shape = self._model_shape()
        parallel.initialize(args, self.shape.num_layers, store)
        config = transformer_config(args, self.shape)
        self.chunks = build_model(self.shape, config)
        self.weights = WeightMap(self.chunks, self.shape)
        self._load_initial_weights()
        self._reference = Reference(self.chunks) if args.use_kl_loss or args.kl_coef else None
        if args.finetune and args.load is not None:  # before the optimizer, which copies the weights
            load_weights(self.chunks, args.load, verify=args.verify)
            self._check_loaded(args.load, "--load")

        reduction = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=args.use_distributed_optimizer,
            overlap_grad_reduce=args.overlap_grad_reduce,
            overlap_param_gather=args.overlap_param_gather,
        )
        low = resolve_dtype(args.dtype) == torch.bfloat16
        self._ddp = [
            DistributedDataParallel(config, reduction, Float16Module(config, chunk) if low else chunk)
            for chunk in self.chunks
        ]
        config.finalize_model_grads_func = finalize_gradients
        if args.overlap_grad_reduce:  # only the last micro-batch's backward pass sends gradients
            waiting = [chunk.no_sync for chunk in self._ddp]
            config.no_sync_func = waiting if len(waiting) > 1 else waiting[0]
        self.optimizer = PolicyOptimizer(args, self._ddp)
        config.grad_scale_func = self.optimizer.inner.scale_loss
        self.memory = LentMemory(self._ddp, self.optimizer)

        self._objective = make_objective(args)
        self._options = head_options(args)
        hook_path = args.custom_tis_function_path if args.loss_type == "policy" else None
        self._hook = ImportanceSampling(args, hook_path) if hook_path else None
        self.passes = Counter()
        """Of the model, in the call of `train` under way; whoever wants to know of them sets its `report`."""
        self.logged_log_probs: dict[int, list[float | None]] = {}
        """See `train`."""
        self.steps_done = 0
        self.rollout_state: dict[str, Any] = {}
        self.checkpoints = Checkpoints(self.chunks, self.optimizer)
        self._newest = NewestCheckpoint(args.save and Path(args.save))
        self._resume()
        self._gather_weights()

    @property
    def data_parallel_rank(self) -> int:
        return parallel_state.get_data_parallel_rank()

    @property
    def data_parallel_size(self) -> int:
        return parallel_state.get_data_parallel_world_size()

    def train(self, steps: Sequence[OptimizerStepBatch]) -> dict[str, float]:
        """Train on this data-parallel rank's share of a step, with one optimizer step for each batch.

        Returns metrics: `train/...`, and those of an importance-sampling hook that have other names. They are means
        over the optimizer steps and, except for times, equal on all ranks. Raises FloatingPointError if a loss or
        gradient is not finite.

        Afterwards `logged_log_probs` holds, by `index`, the log-probabilities [R] of the response tokens of this rank's
        samples that are `logged`: in nats, at the rollout temperature, before the step's updates, None at tokens that
        are not trained on. Only one rank has those of a sample. There are none in supervised training.
        """
        per_token = self.args.calculate_per_token_loss or self.args.loss_type == "sft"
        multiple = length_multiple(self.args)
        plan = [
            [MicroBatch.build(samples, step, multiple=multiple, per_token=per_token) for samples in step.micro_batches]
            for step in steps
        ]
        batches = [batch for step in plan for batch in step]
        metrics: dict[str, float] = {}
        self.logged_log_probs = {}
        if self.args.loss_type == "policy":
            with timed(metrics, "score"):
                prepared = self._prepare(plan, sum(step.num_samples for step in steps))
            metrics |= prepared
        scored = batches[0].old_log_probs is not None
        if scored:  # before a hook takes tokens away
            self.logged_log_probs = self._logged(batches)
        try:
            results = self._optimizer_steps(plan)
        except FloatingPointError as error:
            self.checkpoints.finish()  # so that what is said of the newest checkpoint holds from now on
            raise FloatingPointError(f"{error}{self._newest.gave_up(self.optimizer.steps_done)}") from None
        self._newest.went_on()
        if not scored:
            self.logged_log_probs = self._logged(batches)
        self._gather_weights()
        metrics |= {name: sum(r[name] for r in results) / len(results) for name in set().union(*results)}
        metrics["loss_tokens"] = sum(result["tokens"] for result in results)
        return {name if "/" in name else f"train/{name}": metrics[name] for name in sorted(metrics)}

    def log_probs(self, token_ids: list[int], temperature: float) -> list[float]:
        """Log-probabilities (nats) of tokens 1 .. T-1 of a sequence at `temperature` (0: unscaled, as in engines)."""
        sample = TrainSample(token_ids, 1, [1.0] * (len(token_ids) - 1))
        step = OptimizerStepBatch([[sample]], 1, float(len(token_ids) - 1))
        batch = MicroBatch.build([sample], step, multiple=length_multiple(self.args), per_token=True)
        options = HeadOptions(temperature or 1.0, self.args.log_probs_chunk_size)
        (values,) = score(self._ddp, [batch], options)
        if values is None:
            row = torch.zeros(len(batch.packed), device=device.local_device())
        else:
            row = batch.whole_row(values)
        return parallel.from_last_stage(row)[: len(token_ids) - 1].tolist()

    def hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors of the model, by Hugging Face name; every rank must iterate to the end."""
        return self.weights.tensors()

    def stage_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors of this rank's pipeline stage; every rank of the stage must iterate to the end."""
        return self.weights.stage_tensors()

    def described_weights(self) -> dict[str, Tensor]:
        """All tensors that `hf_weights` gives, without their values."""
        stages: list[list[tuple[str, torch.Size, torch.dtype]]] = [[]] * torch.distributed.get_world_size()
        mine = [(name, tensor.shape, tensor.dtype) for name, tensor in self.weights.described()]
        torch.distributed.all_gather_object(stages, mine)
        return {
            name: torch.empty(shape, dtype=dtype, device="meta") for stage in stages for name, shape, dtype in stage
        }

    @property
    def dtype(self) -> torch.dtype:
        """That of the weights."""
        return self.weights.entries[0].parameter.dtype

    @property
    def stage(self) -> int:
        """This rank's pipeline stage."""
        return parallel_state.get_pipeline_model_parallel_rank()

    def save(self, step: int, rollout_state: dict[str, Any]) -> None:
        """Save a checkpoint of `step` under --save; a failure does not damage earlier checkpoints.

        With --async-save it is written in the background, while anything else may be done, and published by
        `finish_save` or by the next save.
        """
        if self.args.save is None:
            raise ValueError("--save is not given: there is no folder to save to")
        self.memory.wait()
        self._check_finite(step)
        self.checkpoints.begin(Path(self.args.save), step, rollout_state, keep=self.args.save_keep)
        self._newest.saved(step, self.optimizer.steps_done)
        if not self.args.async_save:
            self.checkpoints.finish()

    def finish_save(self, *, wait: bool = True) -> bool:
        """Publish the checkpoint that is being written, if there is one; without `wait`, only if it is written.

        Returns whether none is under way any more. OSError if it could not be written.
        """
        return self.checkpoints.finish(wait=wait)

    def _model_shape(self) -> ModelShape:
        return ModelShape.from_hf(Path(self.args.hf_checkpoint))

    def _load_initial_weights(self) -> None:
        """Load the weights of --ref-load if it is given, else those of --hf-checkpoint."""
        from sleuth.arguments.files_check import is_hf_folder  # here: see `ModelShape.from_hf`

        if self.args.ref_load is not None and not is_hf_folder(self.args.ref_load):
            load_weights(self.chunks, self.args.ref_load, verify=self.args.verify)
            self._check_loaded(self.args.ref_load, "--ref-load")
        else:  # which checks each tensor as it is read
            load_hf_weights(self.weights, Path(self.args.ref_load or self.args.hf_checkpoint))

    def _resume(self) -> None:
        """Go on from --load, if it holds a checkpoint; with --finetune only its weights are used."""
        if self.args.load is None or self.args.finetune:
            return
        resumed = self.checkpoints.load_latest(Path(self.args.load), verify=self.args.verify)
        if resumed is None:
            logger.info("--load %s holds no checkpoint yet: a new run", self.args.load)
        else:
            self.steps_done, self.rollout_state = resumed
            self._check_loaded(self.args.load, "--load")
            if self.args.save is not None and Path(self.args.load).resolve() == Path(self.args.save).resolve():
                self._newest.saved(self.steps_done, self.optimizer.steps_done)

    def _check_finite(self, step: int) -> None:
        """FloatingPointError, on all ranks, if the weights are not to be gone on from: they are not saved then."""
        if ruined := ruined_weights(self.chunks):
            raise FloatingPointError(
                f"expected finite weights after step {step}, found {ruined}; they are not saved: go on from the newest "
                "checkpoint (--load) with a lower --lr or --clip-grad"
            )

    def _check_loaded(self, folder: Path, flag: str) -> None:
        if ruined := ruined_weights(self.chunks):
            raise ValueError(f"{flag}: expected finite weights in {folder}, found {ruined}; name another checkpoint")

    def _prepare(self, plan: list[list[MicroBatch]], num_samples: int) -> dict[str, float]:
        """Compute what is needed before the weights change: log-probabilities, and advantages that depend on them."""
        self._score_before_training(plan)
        if not self.args.kl_coef:
            return {}
        metrics: dict[str, float] = {}
        if parallel.is_last_stage():
            metrics = penalise(self.args, [batch for step in plan for batch in step], num_samples)
        return self._from_last_stage(metrics)

    def _score_before_training(self, plan: list[list[MicroBatch]]) -> None:
        """Compute the log-probabilities of the reference, and those of the policy before it changes.

        If the step has a single optimizer step, its own forward pass gives the latter, so they are computed here only
        if they are needed before it.
        """
        batches = [batch for step in plan for batch in step]
        options = HeadOptions(self.args.rollout_temperature, self.args.log_probs_chunk_size)
        one_done = self.passes.one_done
        if self._reference is not None:
            self.passes.start(len(batches), "micro-batches scored by the reference")
            with self._reference.in_place():
                for batch, values in zip(batches, score(self._ddp, batches, options, one_done), strict=True):
                    batch.ref_log_probs = values
        if len(plan) > 1 or self._hook or self.args.kl_coef or self.args.score_old_log_probs:
            self.passes.start(len(batches), "micro-batches scored")
            for batch, values in zip(batches, score(self._ddp, batches, options, one_done), strict=True):
                batch.old_log_probs = values

    def _logged(self, batches: list[MicroBatch]) -> dict[int, list[float | None]]:
        """What `train` says of `logged_log_probs`."""
        found: dict[int, list[float | None]] = {}
        for batch in batches:
            if batch.old_log_probs is None or not any(sample.logged for sample in batch.samples):
                continue
            row = batch.whole_row(batch.old_log_probs).cpu()
            for sample, values in zip(batch.samples, batch.packed.split_responses(row), strict=True):
                if sample.logged:
                    pairs = zip(values.tolist(), sample.loss_mask, strict=True)
                    found[sample.index] = [value if mask else None for value, mask in pairs]
        return found if parallel.is_first_copy() else {}

    def _optimizer_steps(self, plan: list[list[MicroBatch]]) -> list[dict[str, float]]:
        self.passes.start(sum(map(len, plan)), "micro-batches trained on")
        results = []
        for number, batches in enumerate(plan, start=1):
            self.passes.notes = f"optimizer step {number} of {len(plan)}"
            results.append(self._optimizer_step(batches))
        return results

    def _optimizer_step(self, batches: list[MicroBatch]) -> dict[str, float]:
        metrics = self._apply_hook(batches) if self._hook else {}
        for chunk in self._ddp:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        results = run_model(
            self._ddp, batches, self._options, self._objective, train=True, one_done=self.passes.one_done
        )
        metrics |= self._sum_metrics(results)
        metrics = self._from_last_stage(metrics)
        if not math.isfinite(metrics["loss"]):
            raise FloatingPointError(
                f"the loss is {metrics['loss']} in optimizer step {self.optimizer.steps_done}; the weights are as "
                f"before it. Metrics of the step: {metrics}"
            )
        self.memory.wait()
        result = self.optimizer.step()
        return metrics | {"grad_norm": result.grad_norm, "lr": result.lr}

    def _gather_weights(self) -> None:
        """Collect the weights that the next forward pass would collect, for whoever reads them without one."""
        if self.args.overlap_param_gather:
            for chunk in self._ddp:
                chunk.start_param_sync(force_sync=True)

    def _apply_hook(self, batches: list[MicroBatch]) -> dict[str, float]:
        """Call the hook; returns its metrics. An error is raised on all ranks, so that none waits for another."""
        metrics: dict[str, float] = {}
        error = None
        if self._hook and parallel.is_last_stage():
            try:
                with timed(metrics, "importance_sampling"):
                    metrics |= self._hook.apply(batches)
            except Exception as raised:
                error = raised
        parallel.raise_together(error)
        return metrics

    def _sum_metrics(self, results: list[dict[str, Tensor]]) -> dict[str, float]:
        """Sum metrics over micro-batches and data- and context-parallel ranks; {} before the last pipeline stage."""
        if not results:
            return {}
        names = sorted(results[0])
        totals = torch.stack([torch.stack([result[name].float() for result in results]).sum() for name in names])
        return dict(zip(names, parallel.sum_over_data(totals).tolist(), strict=True))

    def _from_last_stage(self, metrics: dict[str, float]) -> dict[str, float]:
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() == 1:
            return metrics
        box = [metrics]
        last = torch.distributed.get_global_rank(group, group.size() - 1)
        torch.distributed.broadcast_object_list(box, last, group=group)
        return box[0]
