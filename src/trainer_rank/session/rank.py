"""``TrainerRank``: admits, splits or refuses batches of requests and runs what was admitted."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from torch import Tensor

from trainer_rank.admission import Admission
from trainer_rank.errors import RequestError
from trainer_rank.executor.envelope_pricer import EnvelopePricer
from trainer_rank.executor.envelope_store import EnvelopeStore, default_folder
from trainer_rank.executor.oom import map_out_of_memory
from trainer_rank.executor.self_test import self_test
from trainer_rank.memory import Observation, Timeline
from trainer_rank.meters import Meter, open_meter
from trainer_rank.planner import PassWork, Speed
from trainer_rank.planner.recompute import recompute_choices
from trainer_rank.prefix import Layout
from trainer_rank.report import Record
from trainer_rank.requests import Flat, Request, flatten, normaliser
from trainer_rank.runtime import Runtime
from trainer_rank.session.call import Call, MicroBatches
from trainer_rank.session.caller import CallerLoss, traced_bytes_per_token
from trainer_rank.session.candidates import Candidates
from trainer_rank.session.decisions import Decisions
from trainer_rank.session.execution import Execution
from trainer_rank.session.gate import Gate, budget_of, no_price
from trainer_rank.session.hardest import hardest_units
from trainer_rank.session.learning import Learning, environment_of
from trainer_rank.session.micro_batch import MicroBatch
from trainer_rank.session.optimizer import Optimizer, StepOutcome
from trainer_rank.session.planned import PlannedPass
from trainer_rank.session.pricing import Pricing
from trainer_rank.session.profile_pricing import open_pricing
from trainer_rank.session.split import SplitPart
from trainer_rank.session.units import Unit, check_requests, plan_order
from trainer_rank.store import LearnedStore

OnRefuse = Literal["raise", "skip"]
"""What happens to a call with a request that cannot fit."""

HEAD_CHUNK_ROWS: Final = 512
"""Rows that meet the vocabulary projection at a time: enough to keep the matrix product busy, and with a vocabulary of
150,000 no more than 0.3 GiB of float32 logits."""

CALLER_BYTES_PER_TOKEN: Final = 256
"""Allowance for the caller's own loss, per logical token of a pass: 64 float32 values, ten times what the built-in
losses keep."""


class TrainerRank:
    """One rank of post-training that knows its memory before it runs.

    Args:
        runtime: The model.
        memory_budget: All bytes this process may hold on the device, weights included: an int or a string such as
            ``"2GiB"``. On CPU it is a promise about the resident process. None takes what the device can give, less
            a reserve.
        head_chunk_rows: Rows that meet the vocabulary projection at a time.
        max_packed_tokens: Hard cap on packed rows of one pass; None for no cap.
        caller_bytes_per_token: Peak bytes of the caller's own loss and metrics per logical token of a pass.
        layout: Layout every pass must use; None takes the fastest that fits.
        pricing: ``envelope`` prices a pass by a trace of the code it will run. ``profile`` prices it by learned bytes
            per packed row; see ``forward_micro_batches`` for what that supposes, and docs/pricing.md for both.
        store: Keeps what was learned (docs/learning.md); None keeps it in this rank and its checkpoints.
        speed: Predicted time of passes; None takes what the store has, or else a convention.
        on_decision: Called with the record of each verdict, and of each observation once the micro-batch is done.
        verify_backend: Run the packed-versus-alone self-test now.
        meter: Measures device memory; None opens the one that fits the runtime's device.

    Raises:
        TrainerRankMemoryError: The budget is below what is resident already, weights included.
        SelfTestError: Packed and alone disagree on this backend.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        memory_budget: int | str | None = None,
        head_chunk_rows: int = HEAD_CHUNK_ROWS,
        max_packed_tokens: int | None = None,
        caller_bytes_per_token: int = CALLER_BYTES_PER_TOKEN,
        layout: Layout | None = None,
        pricing: Pricing = "envelope",
        store: LearnedStore | None = None,
        speed: Speed | None = None,
        on_decision: Callable[[Record], None] | None = None,
        verify_backend: bool = True,
        meter: Meter | None = None,
    ) -> None:
        _check_positive("head_chunk_rows", head_chunk_rows)
        if max_packed_tokens is not None:
            _check_positive("max_packed_tokens", max_packed_tokens)
        if caller_bytes_per_token < 0:
            raise ValueError(f"caller_bytes_per_token must not be negative, got {caller_bytes_per_token}")
        self.runtime: Final = runtime
        self.meter: Final = open_meter(str(runtime.device), memory_budget) if meter is None else meter
        self._max_packed_tokens = max_packed_tokens
        self._layout = layout
        self._open: Generator[MicroBatch] | None = None
        self._optimizer = Optimizer(runtime.trainable_parameters())
        self._pricer = EnvelopePricer(
            runtime,
            head_chunk_rows=head_chunk_rows,
            caller_bytes_per_token=caller_bytes_per_token,
            store=EnvelopeStore(default_folder()),
        )
        self._pricing = open_pricing(pricing, runtime, self._pricer)
        self._learning = Learning(self._pricing, pricing, store, environment_of(runtime, self.meter), speed)
        decisions = Decisions(runtime, self._pricing, on_decision)
        self._execution = Execution(
            runtime,
            self.meter,
            decisions,
            self._pricing,
            head_chunk_rows=head_chunk_rows,
            caller_bytes_per_token=lambda: self._pricer.caller_bytes_per_token,
        )
        self._gate = Gate(
            runtime,
            self.meter,
            self._optimizer,
            max_packed_tokens=max_packed_tokens,
            head_chunk_rows=head_chunk_rows,
            record=decisions.admission,
        )
        try:
            self._gate.check_budget()
            # A model on ``meta`` computes nothing that could be compared.
            if verify_backend and runtime.device.type != "meta":
                self_test(runtime, head_chunk_rows=head_chunk_rows)
        except BaseException:
            # The cap of a meter that nobody will ever hold would outlive the failure.
            if meter is None:
                self.meter.close()
            raise

    @property
    def last_observation(self) -> Observation | None:
        """What the micro-batch handed out last was measured to need; None before the first is done."""
        return self._execution.last_observation

    @property
    def budget_bytes(self) -> int:
        """The memory budget in force."""
        return self.meter.read().budget_bytes

    def forward_micro_batches(
        self,
        requests: Any,
        *,
        normalisation: str = "token-mean",
        split: Sequence[SplitPart] = (),
        on_refuse: OnRefuse = "raise",
    ) -> MicroBatches:
        """Yield the requests in as few micro-batches as fit, each with outputs and graph; call backward in between.

        The whole plan is made and admitted before anything runs; the budget is read again before each pass.

        With ``pricing="profile"`` the head and the caller's loss together (saved tensors and what backward adds) may
        need at most 6 KiB, twelve blocks of 512 bytes, per logical token of active requests: constants up to 384 KiB
        per request of at least 64 tokens. That pricer does not support heavier callers, and cannot see them.

        Args:
            requests: A nest of requests: one, or lists, tuples, dicts and atomic groups of them, in any order.
            normalisation: ``token-mean``, ``sequence-mean`` or ``sum``: the rule behind ``MicroBatch.coefficients``.
            split: ``MicroBatch.split`` of an earlier call over the same requests, or its beginning: these micro-batches
                are made again as they were, whatever memory there is now, and what they leave is planned.
            on_refuse: ``raise`` refuses the whole call when a request cannot fit; ``skip`` leaves that request out (or
                its whole atomic group) and names it in ``MicroBatches.skipped``. The loss is then that of the others.

        Yields:
            Micro-batches, the one that needs most first. Over the iteration every leaf comes exactly once, but for
            those skipped; ``restore`` puts results back into the caller's order and nesting.

        Raises:
            RequestError: A request is malformed for this model, or ``split`` is of other requests. Nothing ran.
            TrainerRankMemoryError: A request cannot fit alone (refused, nothing ran), memory shrank so far between
                passes that the rest cannot fit, a micro-batch of ``split`` does not fit any more, or an admitted pass
                ran out of memory. Earlier passes keep their gradients.
        """
        flat = flatten(requests)
        check_requests(flat.leaves, self.runtime.facts)
        rule = normaliser(flat.leaves, normalisation)
        if flat.leaves and not rule.num_trained and any(request.active for request in flat.leaves):
            warnings.warn("no_trained_tokens: every label of the batch is ignored; loss and gradient are 0",
                          RuntimeWarning, stacklevel=2)  # fmt: skip
        if on_refuse not in ("raise", "skip"):
            raise RequestError(f"on_refuse must be 'raise' or 'skip', got {on_refuse!r}", field="on_refuse")
        self._settle()
        call = self._call(flat, skip=on_refuse == "skip", recorded=split)
        return MicroBatches(call, call.run(self._execution, rule))

    def forward(self, requests: Any, *, normalisation: str = "token-mean") -> MicroBatch:
        """Run all requests now and return one micro-batch with every output and every graph alive.

        For losses that need all requests at once. What stays alive between forward and backward adds up, so less fits
        than through ``forward_micro_batches``; it runs in as many forwards as make it fit.

        Args:
            requests: As for ``forward_micro_batches``.
            normalisation: Likewise.

        Raises:
            RequestError: A request is malformed for this model. Nothing ran.
            TrainerRankMemoryError: All requests together do not fit (refused, nothing ran), or the admitted forward
                ran out of memory.
        """
        flat = flatten(requests)
        check_requests(flat.leaves, self.runtime.facts)
        rule = normaliser(flat.leaves, normalisation)
        self._settle()
        self._learning.begin()
        group = self._candidates(flat, [unit for units in plan_order(flat, self.runtime.facts) for unit in units])
        candidate, verdict = self._gate.admit_together(flat, group)
        self._open = self._execution.run(flat, rule, candidate, verdict, split=())
        return next(self._open)

    def _settle(self) -> None:
        """Measure what the last ``forward`` needed, its backward included, before anything else runs."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def trace_loss(self, loss: CallerLoss, requests: Sequence[Request]) -> int:
        """Find what a loss of your own needs, use it in every later price, and return it in bytes per logical token.

        The loss and its backward run on shapes without values; nothing is computed.

        Args:
            loss: A micro-batch in, a scalar with graph out; it may not look at a value.
            requests: Examples with the payloads the loss reads.

        Raises:
            ConfigError: The loss cannot run without data, or no request is active.
        """
        found = traced_bytes_per_token(loss, requests, self.runtime)
        self._pricing.check_caller(found, source="what the loss needs")
        self._pricer.caller_bytes_per_token = found
        return found

    def plan(self, requests: Any) -> tuple[PlannedPass, ...]:
        """Return the micro-batches that ``forward_micro_batches`` would make of the requests now; nothing runs.

        Args:
            requests: As for ``forward_micro_batches``.

        Raises:
            RequestError: A request is malformed for this model.
            TrainerRankMemoryError: A request cannot fit alone.
        """
        flat = flatten(requests)
        check_requests(flat.leaves, self.runtime.facts)
        return tuple(PlannedPass.of(*one) for one in self._call(flat).planned())

    def plan_alone(self, requests: Any) -> tuple[PlannedPass, ...]:
        """Return each request as a pass of its own beside others of its step, admitted or not; nothing runs.

        A batch is refused exactly when one of its requests is not admitted so (or not within the cap).

        Args:
            requests: As for ``forward_micro_batches``; an atomic group counts as one.

        Raises:
            RequestError: A request is malformed for this model.
        """
        flat = flatten(requests)
        check_requests(flat.leaves, self.runtime.facts)
        budget, pending = self._gate.read_budget(), self._gate.pending(split=True)
        return tuple(
            PlannedPass.of(*group.admission((number,), budget, pending))
            for units in plan_order(flat, self.runtime.facts)
            for group in [self._candidates(flat, units)]
            for number in range(group.num_units)
        )

    def hardest(self, requests: Any, *, on_refuse: OnRefuse = "raise") -> PlannedPass | None:
        """Return the request (or atomic group) that needs most when it runs alone; None when none computes anything.

        Whatever steps the requests are drawn into, in whatever order, a pass is split until it fits, down to one
        request or atomic group. When the hardest one fits, no step over these requests is ever refused on a device as
        it is now.

        Args:
            requests: As for ``forward_micro_batches``.
            on_refuse: ``skip`` passes over those that cannot fit.

        Raises:
            RequestError: A request is malformed for this model.
            TrainerRankMemoryError: One cannot fit alone; nothing ran.
        """
        flat = flatten(requests)
        check_requests(flat.leaves, self.runtime.facts)
        budget, pending = self._gate.read_budget(), self._gate.pending(split=True)
        found = []
        for units in plan_order(flat, self.runtime.facts):
            group = self._candidates(flat, units)
            features = self._pricer.features if self._pricing.grows_with_features else None
            for number in hardest_units(flat, units, features):
                candidate, verdict = group.admission((number,), budget, pending)
                if not verdict.admitted or not group.within_cap((number,)):
                    if on_refuse == "skip":
                        continue
                    raise self._gate.refusal(flat, group, number, budget, begun=False)
                found.append(PlannedPass.of(candidate, verdict))
        return max(found, key=lambda one: one.admission.charged_bytes, default=None)

    def timeline(self, work: PassWork) -> Timeline:
        """Return what a planned pass allocates when, phase by phase, from a run without data.

        The caller's declared bytes are not in it.
        """
        return self._pricer.timeline(work)

    def optim_step(
        self,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = None,
    ) -> StepOutcome:
        """Clip the accumulated gradient, take one AdamW step and clear the gradient.

        A gradient that is not finite is dropped and the step skipped, with a warning.
        """
        self._settle()
        begin = self.meter.read()
        try:
            return self._optimizer.step(
                lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm
            )
        except Exception as error:
            admission = Admission(price=no_price(), budget=budget_of(begin), pending=self._gate.pending(split=True))
            mapped = map_out_of_memory(error, admission=admission, phase="optimizer")
            if mapped is error:
                raise
            raise mapped from error

    def zero_grad(self) -> None:
        """Drop the accumulated gradient."""
        self._optimizer.zero_grad()

    def save_adapter(self, path: Path) -> None:
        """Write what is trained (the adapter, or the whole model) into the folder ``path``."""
        self.runtime.save(path)

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return AdamW's state as ``<slot>.<name of the parameter>``, the tensors themselves; empty before a step."""
        return self._optimizer.state(self.runtime.trained())

    def load_optimizer_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what ``optimizer_state`` returned, for a model with the same trained parameters.

        Raises:
            ValueError: A tensor is of no trained parameter, or not of its shape.
        """
        self._optimizer.load(tensors, self.runtime.trained())

    def learned(self) -> dict[str, Any]:
        """Return what passes taught, and the speed that plans are made with, as plain values for a checkpoint."""
        self._settle()
        return self._learning.state()

    def load_learned(self, values: Mapping[str, Any]) -> None:
        """Go on from what ``learned`` returned; what was learned of another model, device or version is left alone."""
        self._learning.load(values)

    def _call(self, flat: Flat, *, skip: bool = False, recorded: Sequence[SplitPart] = ()) -> Call:
        self._learning.begin()
        groups = [self._candidates(flat, units) for units in plan_order(flat, self.runtime.facts)]
        return Call(flat, groups, self._gate, skip=skip, recorded=recorded)

    def _candidates(self, flat: Flat, units: Sequence[Unit]) -> Candidates:
        # Learned bytes per row do not tell how many layers were recomputed; all of them are, then.
        chosen = self.runtime.recompute == "auto" and self._pricing.tells_recompute
        facts = self.runtime.facts
        choices = recompute_choices(facts.num_layers) if chosen else ()
        speed = self._learning.speed
        return Candidates(
            flat.leaves, units, self._pricing, self._layout, self._max_packed_tokens, facts, choices, speed
        )


def _check_positive(name: str, value: int) -> None:
    if value < 1 or not math.isfinite(value):
        raise ValueError(f"{name} must be at least 1, got {value}")
