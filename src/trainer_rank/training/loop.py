"""The training loop: rollouts in, optimizer steps, a run folder out."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from trainer_rank.errors import TrainingError, TrainingInterruptedError
from trainer_rank.prefix import build_tree
from trainer_rank.requests import Request, flatten
from trainer_rank.session import TrainerRank
from trainer_rank.training.callbacks import Callback, Scalars, evaluation_scalars, step_scalars, tell
from trainer_rank.training.config import TrainConfig
from trainer_rank.training.data_files import read_data
from trainer_rank.training.formats import Words
from trainer_rank.training.interrupt import Interrupts, StopRequested
from trainer_rank.training.keeper import Keeper
from trainer_rank.training.learning_rate import learning_rate
from trainer_rank.training.load_rank import load_model, load_rank
from trainer_rank.training.losses import MetricSums, Objective, objective_for
from trainer_rank.training.model_limits import limits_of
from trainer_rank.training.one_by_one import compare
from trainer_rank.training.passes import Passes
from trainer_rank.training.plan_log import NAME as PLANS
from trainer_rank.training.plan_log import PlanLog
from trainer_rank.training.progress import Progress
from trainer_rank.training.records import ComparisonRecord, EvaluationRecord, RunSummary, StepRecord
from trainer_rank.training.resident import ResidentPeak
from trainer_rank.training.resume import Resumption, digest_of, find_resumption
from trainer_rank.training.rollouts import Rollout
from trainer_rank.training.run_folder import RunFolder
from trainer_rank.training.schedule import group_rollouts, plan_steps
from trainer_rank.training.tensorboard import TensorBoard, check_installed
from trainer_rank.training.verify import Verification


def train(
    config: TrainConfig,
    *,
    progress: Progress,
    callbacks: Sequence[Callback] = (),
    resume: str | None = None,
    allow_changed: bool = False,
) -> Path:
    """Train as ``config`` says and return the run folder.

    Data are read and checked before the model is loaded, and every step is admitted before it runs.

    Args:
        config: What to do.
        progress: Told of everything that happens.
        callbacks: Called with the figures of every step and evaluation, ``callback(step, scalars)``.
        resume: A run folder, or ``latest``, to go on from its newest checkpoint, bit for bit; None starts a new run.
        allow_changed: Go on even when ``config`` or the data make the steps to come those of another run.

    Raises:
        ConfigError: The model's path holds no model, the run folder cannot be written, or the run to resume is not
            there, is of another model or was another run.
        DataError: A data file is malformed.
        UnsupportedModelError: The model cannot be run as prefix trees with unchanged numbers.
        TrainerRankMemoryError: A request cannot fit the budget, or an admitted pass ran out of memory.
        TrainingError: Loss or gradient is no longer finite, a callback raised, or a file cannot be written.
        TrainingInterruptedError: SIGINT or SIGTERM came; the last complete step is in a checkpoint.
    """
    if config.tensorboard:
        check_installed()
    objective, path = objective_for(config.loss), Path(config.data.path)
    limits = replace(limits_of(config.model.path, loss=config.loss.name), needs=objective.needs)
    words = Words(model=config.model.path, train_on=config.data.train_on)
    groups = group_rollouts(objective.prepare(read_data(path, limits, words), path))
    evaluation = None if config.data.eval_path is None else read_data(Path(config.data.eval_path), limits, words)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    steps, data_digest = plan_steps(groups, config), digest_of(Path(config.data.path))
    resumption = None
    if resume is not None:
        resumption = find_resumption(
            config, resume, data_digest=data_digest, allow_changed=allow_changed, progress=progress
        )
        resumption.check_length(len(steps))
        if resumption.is_finished(len(steps)):
            progress.note(f"nothing to do: all {len(steps)} steps of {resumption.path} are done; raise steps to go on")
            return resumption.path
        folder = RunFolder(resumption.path)
    else:
        folder = RunFolder.create(config, threads=torch.get_num_threads())
    progress.loading(requests=sum(len(group) for group in groups), model=config.model.path)
    resident = ResidentPeak()
    runtime = load_model(config)
    # The rank's meter starts the system's peak again; loading the model is the piece before.
    resident.sample()
    rank = load_rank(config, runtime, on_decision=lambda record: folder.decision(record.as_line()))
    if resumption is None:
        folder.learned(rank.learned())
    else:
        resumption.load(rank)
        resumption.cut_back(config)
        folder.reopen()
    run = _Run(config, rank, folder, progress, resident, callbacks, resumption, data_digest, objective)
    return run.whole(steps, evaluation)


class _Run:
    """One run on a loaded rank."""

    def __init__(
        self,
        config: TrainConfig,
        rank: TrainerRank,
        folder: RunFolder,
        progress: Progress,
        resident: ResidentPeak,
        callbacks: Sequence[Callback],
        resumption: Resumption | None,
        data_digest: str,
        objective: Objective,
    ) -> None:
        self._config = config
        self._rank = rank
        self._folder = folder
        self._progress = progress
        self._objective = objective
        self._resident = resident
        self._callbacks = callbacks
        self._interrupts = Interrupts()
        self._keeper = Keeper(config, rank, folder, resumption, data_digest)
        self._plans = PlanLog(folder.path / PLANS)
        if resumption is not None and not resumption.repeats:
            self._plans.forget()

    def whole(self, steps: Sequence[Sequence[Rollout]], evaluation: Sequence[Rollout] | None) -> Path:
        """Run what is left of the steps and evaluations, save, and return the folder."""
        board = TensorBoard(self._folder.path / "tensorboard") if self._config.tensorboard else None
        if board is not None:
            self._callbacks = (*self._callbacks, board)
        try:
            with self._interrupts:
                return self._whole(steps, evaluation)
        except StopRequested:
            # Half a gradient is worth nothing: the step it belongs to is repeated as a whole.
            self._rank.zero_grad()
            path = self._keeper.save()
            raise TrainingInterruptedError(
                f"stopped after step {self._keeper.done} of {len(steps)}; checkpoint: {path}. Continue with: "
                f"trainer-rank train CONFIG --resume {self._folder.path}"
            ) from None
        finally:
            if board is not None:
                board.close()

    def _whole(self, steps: Sequence[Sequence[Rollout]], evaluation: Sequence[Rollout] | None) -> Path:
        config, keeper = self._config, self._keeper
        batches = [[self._trained(rollout) for rollout in rollouts] for rollouts in steps]
        self._progress.started(
            steps=len(batches),
            packed_rows=sum(_packed_rows(batch) for batch in batches[keeper.done :]),
            budget_bytes=self._rank.budget_bytes,
            run_folder=self._folder.path,
        )
        self._check_worst(batches)
        for number, batch in enumerate(batches[keeper.done :], start=keeper.done + 1):
            due = number == 1 or (config.eval_every is not None and (number - 1) % config.eval_every == 0)
            if evaluation is not None and due:
                self._evaluate(evaluation, step=number - 1)
            record = self._step(batch, number=number, num_steps=len(batches))
            keeper.stepped(number)
            self._tell(number, step_scalars(record))
        keeper.save()
        if evaluation is not None:
            self._evaluate(evaluation, step=len(batches))
        comparison = self._compare(steps) if config.compare_one_by_one else None
        self._rank.save_adapter(self._folder.path / "adapter")
        # From the files, since steps and evaluations may be those of several processes.
        records, evaluations = self._folder.steps(), self._folder.evaluations()
        summary = RunSummary(
            steps=len(records),
            seconds=keeper.seconds,
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
        hardest = self._rank.hardest(nest, on_refuse=self._config.on_refuse)
        if self._config.warm_up == "none" or hardest is None:
            return
        leaves = flatten(nest).leaves
        worst = self._objective.referenced(self._rank, [leaves[index] for index in hardest.indices])
        for micro_batch in self._rank.forward_micro_batches(self._objective.nest(worst)):
            self._objective.checked(self._objective.loss(micro_batch), micro_batch, step=0).backward()
            del micro_batch
        self._resident.note(self._rank.last_observation)
        self._rank.zero_grad()

    def _step(self, batch: list[Request], *, number: int, num_steps: int) -> StepRecord:
        config, begin = self._config, time.perf_counter()
        loss_value, passes, metrics, objective = 0.0, Passes(), MetricSums(), self._objective
        nest = objective.nest(objective.referenced(self._rank, batch))
        # Indices count the leaves of the nest, which keeps pairs together.
        verification = Verification(config, flatten(nest).leaves, step=number)
        micro_batches = self._rank.forward_micro_batches(
            nest,
            normalisation=config.loss.normalisation,
            split=self._plans.recorded(number),
            on_refuse=config.on_refuse,
        )
        for micro_batch in micro_batches:
            self._plans.note(number, micro_batch.split)
            self._observe(passes)
            loss = objective.checked(objective.loss(micro_batch), micro_batch, step=number)
            loss.backward()
            loss_value += float(loss.detach())
            metrics += objective.metrics(micro_batch)
            passes.add(micro_batch.stats)
            verification.keep(micro_batch)
            self._progress.advanced(step=number, packed_rows=micro_batch.stats.packed_rows)
            # What is still referred to here would be charged to the next pass.
            del loss, micro_batch
            self._interrupts.check()
        self._observe(passes)
        for skipped in micro_batches.skipped:
            self._progress.note(f"step {number}: skipped: {skipped.reason}")
        if not math.isfinite(loss_value):
            raise TrainingError(self._stopped(number, f"the loss is {loss_value}"))
        difference = verification.difference(self._rank)
        lr = learning_rate(config.optimizer, number - 1, num_steps=num_steps)
        outcome = self._rank.optim_step(
            lr=lr,
            betas=config.optimizer.betas,
            weight_decay=config.optimizer.weight_decay,
            max_grad_norm=config.optimizer.max_grad_norm,
        )
        if outcome.skipped:
            raise TrainingError(self._stopped(number, f"the norm of the gradient is {outcome.grad_norm}"))
        self._resident.sample()
        seconds, quality = time.perf_counter() - begin, micro_batches.quality
        record = StepRecord(
            step=number,
            requests=len(batch),
            skipped=len(micro_batches.skipped),
            plan_gap=quality.gap if quality is not None and quality.passes else None,
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
            verify_difference=difference,
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
            self._interrupts.check()
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
        self._tell(step, evaluation_scalars(record))
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

    def _tell(self, step: int, scalars: Scalars) -> None:
        try:
            tell(self._callbacks, step, scalars)
        except TrainingError as error:
            path = self._keeper.save()
            raise TrainingError(
                f"{error}. The run is whole up to step {self._keeper.done}, in {path}; mend the callback and continue "
                f"with --resume {self._folder.path}"
            ) from error

    def _trained(self, rollout: Rollout) -> Request:
        return _request(rollout, payload=self._objective.payload(rollout))

    def _observe(self, passes: Passes) -> None:
        passes.observe(self._rank.last_observation)
        self._resident.note(self._rank.last_observation)

    def _stopped(self, number: int, reason: str) -> str:
        return (
            f"step {number}: {reason}, so the run stops before the weights change; the steps before it are in "
            f"{self._folder.path}. Lower optimizer.lr or look at the step's data"
        )


def _request(rollout: Rollout, *, no_grad: bool = False, payload: object = None) -> Request:
    return Request.next_token(
        rollout.tokens, trained=rollout.trained, weight=rollout.weight, no_grad=no_grad, payload=payload
    )


def _packed_rows(requests: Sequence[Request]) -> int:
    return build_tree([request.tokens for request in requests]).packed_rows_of_range(0, len(requests))
