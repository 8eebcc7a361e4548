"""The training loop: rollouts in, optimizer steps, a run folder out."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig

from trainer_rank.errors import ConfigError, TrainingError
from trainer_rank.memory import Observation
from trainer_rank.prefix import build_tree
from trainer_rank.requests import Request, flatten
from trainer_rank.runtime.transformers import LoraConfig, TransformersRuntime
from trainer_rank.session import MicroBatchStats, TrainerRank
from trainer_rank.training.config import TrainConfig
from trainer_rank.training.losses import MetricSums, Objective, objective_for
from trainer_rank.training.one_by_one import compare
from trainer_rank.training.parquet import read_data
from trainer_rank.training.progress import Progress
from trainer_rank.training.records import ComparisonRecord, EvaluationRecord, RunSummary, StepRecord
from trainer_rank.training.resident import ResidentPeak
from trainer_rank.training.rollouts import Limits, Rollout
from trainer_rank.training.run_folder import RunFolder
from trainer_rank.training.schedule import group_rollouts, plan_steps


def train(config: TrainConfig, *, progress: Progress) -> Path:
    """Train as ``config`` says and return the run folder.

    Data are read and checked before the model is loaded, and every step is admitted before it runs.

    Raises:
        ConfigError: The model's path holds no model, or the run folder cannot be written.
        DataError: A data file is malformed.
        UnsupportedModelError: The model cannot be run as prefix trees with unchanged numbers.
        TrainerRankMemoryError: A request cannot fit the budget, or an admitted pass ran out of memory.
        TrainingError: Loss or gradient is no longer finite.
    """
    objective = objective_for(config.loss)
    limits, path = _limits(config, objective), Path(config.data.path)
    groups = group_rollouts(objective.prepare(read_data(path, limits), path))
    evaluation = None if config.data.eval_path is None else read_data(Path(config.data.eval_path), limits)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    folder = RunFolder.create(config, threads=torch.get_num_threads())
    progress.loading(requests=sum(len(group) for group in groups), model=config.model.path)
    resident = ResidentPeak()
    rank = _load(config, folder, resident)
    run = _Run(config, rank, folder, progress, resident, objective)
    return run.whole(plan_steps(groups, config), evaluation)


class _Run:
    """One run on a loaded rank."""

    def __init__(
        self,
        config: TrainConfig,
        rank: TrainerRank,
        folder: RunFolder,
        progress: Progress,
        resident: ResidentPeak,
        objective: Objective,
    ) -> None:
        self._config = config
        self._rank = rank
        self._folder = folder
        self._progress = progress
        self._objective = objective
        self._resident = resident

    def whole(self, steps: Sequence[Sequence[Rollout]], evaluation: Sequence[Rollout] | None) -> Path:
        """Run all steps and evaluations, save, and return the folder."""
        config, begin = self._config, time.perf_counter()
        batches = [[self._trained(rollout) for rollout in rollouts] for rollouts in steps]
        self._progress.started(
            steps=len(batches),
            packed_rows=sum(_packed_rows(batch) for batch in batches),
            budget_bytes=self._rank.budget_bytes,
            run_folder=self._folder.path,
        )
        self._check_worst(batches)
        evaluations: list[EvaluationRecord] = []
        records: list[StepRecord] = []
        for number, batch in enumerate(batches, start=1):
            due = number == 1 or (config.eval_every is not None and (number - 1) % config.eval_every == 0)
            if evaluation is not None and due:
                evaluations.append(self._evaluate(evaluation, step=number - 1))
            records.append(self._step(batch, number=number))
        if evaluation is not None:
            evaluations.append(self._evaluate(evaluation, step=len(batches)))
        comparison = self._compare(steps) if config.compare_one_by_one else None
        self._rank.save_adapter(self._folder.path / "adapter")
        summary = RunSummary(
            steps=len(records),
            seconds=time.perf_counter() - begin,
            packed_rows=sum(record.packed_rows for record in records),
            trained_tokens=sum(record.trained_tokens for record in records),
            first_evaluation_loss=evaluations[0].loss if evaluations else None,
            last_evaluation_loss=evaluations[-1].loss if evaluations else None,
            peak_resident_bytes=self._resident.sample(),
            budget_bytes=self._rank.budget_bytes,
            comparison=comparison,
        )
        self._folder.summary(summary)
        self._progress.finished(summary, run_folder=self._folder.path)
        return self._folder.path

    def _check_worst(self, batches: Sequence[Sequence[Request]]) -> None:
        """Refuse the run now if any of its requests can never be admitted; run the hardest first when asked to."""
        nest = [self._objective.nest(batch) for batch in batches]
        hardest = self._rank.hardest(nest)
        if self._config.warm_up == "none" or hardest is None:
            return
        leaves = flatten(nest).leaves
        worst = self._objective.referenced(self._rank, [leaves[index] for index in hardest.indices])
        for micro_batch in self._rank.forward_micro_batches(self._objective.nest(worst)):
            self._objective.checked(self._objective.loss(micro_batch), micro_batch, step=0).backward()
            del micro_batch
        self._resident.note(self._rank.last_observation)
        self._rank.zero_grad()

    def _step(self, batch: list[Request], *, number: int) -> StepRecord:
        config, begin = self._config, time.perf_counter()
        loss_value, passes, metrics, objective = 0.0, _Passes(), MetricSums(), self._objective
        nest = objective.nest(objective.referenced(self._rank, batch))
        for micro_batch in self._rank.forward_micro_batches(nest, normalisation=config.loss.normalisation):
            self._observe(passes)
            loss = objective.checked(objective.loss(micro_batch), micro_batch, step=number)
            loss.backward()
            loss_value += float(loss.detach())
            metrics += objective.metrics(micro_batch)
            passes.add(micro_batch.stats)
            self._progress.advanced(step=number, packed_rows=micro_batch.stats.packed_rows)
            # What is still referred to here would be charged to the next pass.
            del loss, micro_batch
        self._observe(passes)
        if not math.isfinite(loss_value):
            raise TrainingError(self._stopped(number, f"the loss is {loss_value}"))
        lr = config.optimizer.lr_at(number - 1)
        outcome = self._rank.optim_step(
            lr=lr,
            betas=config.optimizer.betas,
            weight_decay=config.optimizer.weight_decay,
            max_grad_norm=config.optimizer.max_grad_norm,
        )
        if outcome.skipped:
            raise TrainingError(self._stopped(number, f"the norm of the gradient is {outcome.grad_norm}"))
        self._resident.sample()
        seconds = time.perf_counter() - begin
        record = StepRecord(
            step=number,
            requests=len(batch),
            logical_tokens=passes.logical_tokens,
            packed_rows=passes.packed_rows,
            sharing_ratio=passes.logical_tokens / passes.packed_rows if passes.packed_rows else 1.0,
            passes=passes.count,
            predicted_peak_bytes=passes.predicted_peak_bytes,
            observed_peak_bytes=passes.observed_peak_bytes,
            budget_bytes=self._rank.budget_bytes,
            trained_tokens=passes.trained_tokens,
            trained_tokens_per_second=passes.trained_tokens / seconds,
            loss=loss_value,
            grad_norm=outcome.grad_norm,
            lr=lr,
            seconds=seconds,
            metrics=metrics.means(),
        )
        self._folder.step(record)
        self._progress.stepped(record)
        return record

    def _evaluate(self, rollouts: Sequence[Rollout], *, step: int) -> EvaluationRecord:
        begin = time.perf_counter()
        requests = [_request(rollout, no_grad=True) for rollout in rollouts]
        total, trained = 0.0, sum(request.num_trained for request in requests)
        for micro_batch in self._rank.forward_micro_batches(requests):
            self._resident.note(self._rank.last_observation)
            total -= sum(float(result.logprobs.sum()) for result in micro_batch.results if result.logprobs is not None)
        self._resident.sample()
        record = EvaluationRecord(
            step=step,
            requests=len(requests),
            trained_tokens=trained,
            loss=total / trained if trained else 0.0,
            seconds=time.perf_counter() - begin,
        )
        self._folder.evaluation(record)
        self._progress.evaluated(record)
        return record

    def _compare(self, steps: Sequence[Sequence[Rollout]]) -> ComparisonRecord:
        """Compare on the smallest group that shares anything; the rank is warm, and the gradients are discarded."""
        groups = [[self._trained(rollout) for rollout in group] for step in steps for group in group_rollouts(step)]
        smallest = min(groups, key=lambda group: (len(group) == 1, _packed_rows(group)))
        requests = self._objective.referenced(self._rank, smallest)
        self._progress.comparing(requests=len(requests))
        record = compare(self._rank, requests, self._objective.loss, normalisation=self._config.loss.normalisation)
        self._progress.compared(record)
        return record

    def _trained(self, rollout: Rollout) -> Request:
        return _request(rollout, payload=self._objective.payload(rollout))

    def _observe(self, passes: _Passes) -> None:
        passes.observe(self._rank.last_observation)
        self._resident.note(self._rank.last_observation)

    def _stopped(self, number: int, reason: str) -> str:
        return (
            f"step {number}: {reason}, so the run stops before the weights change; the steps before it are in "
            f"{self._folder.path}. Lower optimizer.lr or look at the step's data"
        )


class _Passes:
    """Sums and maxima over the passes of one step; each ``add`` is followed by an ``observe`` once it has run."""

    def __init__(self) -> None:
        self.count = 0
        self.packed_rows = 0
        self.logical_tokens = 0
        self.trained_tokens = 0
        self.predicted_peak_bytes = 0
        self.observed_peak_bytes: int | None = None
        self._resident_bytes: int | None = None

    def add(self, stats: MicroBatchStats) -> None:
        self.count += stats.passes
        self.packed_rows += stats.packed_rows
        self.logical_tokens += stats.logical_tokens
        self.trained_tokens += stats.trained_tokens
        self.predicted_peak_bytes = max(self.predicted_peak_bytes, stats.predicted_peak_bytes)
        self._resident_bytes = stats.resident_bytes

    def observe(self, observation: Observation | None) -> None:
        if observation is not None and self._resident_bytes is not None:
            peak_bytes = self._resident_bytes + observation.peak_bytes
            self.observed_peak_bytes = max(self.observed_peak_bytes or 0, peak_bytes)


def _limits(config: TrainConfig, objective: Objective) -> Limits:
    """Return what the model's own configuration demands of the data, read before any weight is."""
    path = config.model.path
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(
            f"model.path: must be a folder with config.json and weights, got {path!r}; "
            "relative paths count from the current folder"
        )
    try:
        model = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path!r} holds no model that Transformers knows: {error}") from error
    return Limits(
        vocabulary_size=getattr(model, "vocab_size", None),
        context_length=getattr(model, "max_position_embeddings", None),
        loss=config.loss.name,
        needs=objective.needs,
    )


def _load(config: TrainConfig, folder: RunFolder, resident: ResidentPeak) -> TrainerRank:
    lora = config.model.lora
    runtime = TransformersRuntime.from_pretrained(
        config.model.path,
        lora=None
        if lora is None
        else LoraConfig(r=lora.rank, lora_alpha=lora.alpha, lora_dropout=0.0, target_modules=list(lora.targets)),
        recompute=config.model.recompute,
        dtype=config.model.dtype,
    )
    # The rank's meter starts the system's peak again; loading the model is the piece before.
    resident.sample()
    return TrainerRank(
        runtime, memory_budget=config.memory_budget, on_decision=lambda record: folder.decision(record.as_line())
    )


def _request(rollout: Rollout, *, no_grad: bool = False, payload: object = None) -> Request:
    return Request.next_token(
        rollout.tokens, trained=rollout.trained, weight=rollout.weight, no_grad=no_grad, payload=payload
    )


def _packed_rows(requests: Sequence[Request]) -> int:
    return build_tree([request.tokens for request in requests]).packed_rows_of_range(0, len(requests))
