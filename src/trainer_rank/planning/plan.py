"""Plans a step on a simulated device, with the rank that would run it there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from trainer_rank.errors import TrainerRankMemoryError
from trainer_rank.executor.envelope_pricer import EnvelopePricer
from trainer_rank.executor.envelope_store import EnvelopeStore, default_folder
from trainer_rank.memory import AllocatorSettings, Price
from trainer_rank.meters.devices import Device
from trainer_rank.meters.simulated_device import Simulated
from trainer_rank.meters.waste import expandable_by_environment
from trainer_rank.planner import PassWork, pass_work
from trainer_rank.planning.bound import at_most
from trainer_rank.planning.data_set import DataSet, refused_alone
from trainer_rank.planning.details import prefix_tree, timeline
from trainer_rank.planning.fixes import find_fixes
from trainer_rank.planning.options import Options, make_runtime
from trainer_rank.planning.report import DataSetReport, PassReport, PlanReport, Refused
from trainer_rank.requests import Request
from trainer_rank.runtime.transformers import TransformersRuntime
from trainer_rank.session import TrainerRank
from trainer_rank.session.planned import PlannedPass

Requests = Callable[[int], Sequence[Request]]
"""Makes the requests of a step for a vocabulary of so many tokens."""

Shorter = Callable[[int], tuple[str, Requests] | None]
"""The change in words and the requests with none of more than so many tokens; None when that leaves nothing."""

__all__ = ["Options", "Requests", "Shorter", "make_data_set_plan", "make_plan"]


def make_plan(
    options: Options,
    device: Device,
    requests: Requests,
    *,
    with_fixes: bool = True,
    with_details: bool = False,
    shorter: Shorter | None = None,
) -> PlanReport:
    """Return whether and how a step over the requests fits a device; nothing is trained and no weight is read.

    Args:
        options: How the step is trained.
        device: The GPU, which need not be there.
        requests: Makes the requests.
        with_fixes: Whether to look for what makes a step fit that does not.
        with_details: Whether to trace the worst pass for its timeline and its tree.
        shorter: Makes requests of no more than so many tokens, for the fix that shortens them.

    Raises:
        ConfigError: The model is unknown or its folder holds no configuration.
        UnsupportedModelError: The model cannot be run as prefix trees.
        RequestError: A request is malformed for this model.
    """
    runtime = make_runtime(options)
    planned = _Planned(options, device, runtime, requests(runtime.facts.vocabulary_size))
    report = planned.report
    if with_details:
        report = _with_details(report, options, planned)
    if report.fits or not with_fixes:
        return report

    def again(changed: Options, other: Device) -> PlanReport:
        return make_plan(changed, other, requests, with_fixes=False)

    def shortened(changed: Options, longest: int) -> tuple[str, PlanReport] | None:
        found = None if shorter is None else shorter(longest)
        return None if found is None else (found[0], make_plan(changed, device, found[1], with_fixes=False))

    return replace(report, fixes=tuple(find_fixes(options, device, report, again, shortened)))


def make_data_set_plan(
    options: Options, device: Device, data: DataSet, *, with_fixes: bool = True, with_details: bool = False
) -> PlanReport:
    """Return whether every step of a data set fits, in whatever order its groups are drawn.

    A batch is split down to single requests before it is refused. The verdict therefore asks every request alone, with
    everything charged that stands beside it in a split step; that is exact, and no order has to be tried. Passes,
    timeline and tree are those of the heaviest step.

    Raises:
        ConfigError, UnsupportedModelError, RequestError: As ``make_plan``.
    """
    runtime = make_runtime(options)
    heaviest = data.heaviest_step()
    step = [request for number in heaviest for request in data.groups[number]]
    pricer = EnvelopePricer(
        runtime, head_chunk_rows=options.head_chunk_rows, caller_bytes_per_token=options.caller_bytes_per_token,
        store=EnvelopeStore(default_folder()),
    )  # fmt: skip
    # Made before the device opens; the rank then finds it in the store. Weights that do not fit need none.
    envelope = pricer.envelope() if _beside_passes(device, runtime) <= device.usable_bytes else None
    planned = _Planned(options, device, runtime, step, data)
    report = planned.report
    room = report.capacity_bytes - report.reserve_bytes
    worst, by = room, "room"
    if envelope is not None:
        bound = at_most(
            envelope, runtime, data.sizes, groups_per_step=data.groups_per_step, repeats=data.repeats,
            head_chunk_rows=options.head_chunk_rows, max_packed_tokens=options.max_packed_tokens,
        )  # fmt: skip
        facts = runtime.facts
        # A step that is never split has no gradients beside a pass but its own, which are in the price.
        pending = facts.adam_state_bytes + (0 if options.max_packed_tokens is None else facts.trainable_bytes)
        whole = sum(report.resident.values()) + pending + bound.num_bytes
        if whole <= room:
            worst, by = whole, "sizes"
    report = replace(
        report,
        data_set=DataSetReport(
            requests=len(data.requests), groups=len(data.groups), groups_per_step=data.groups_per_step,
            longest_request=max(request.num_tokens for request in data.requests), shapes=len(data.distinct()),
            refused=planned.refused, heaviest_step=heaviest, worst_bytes=worst, worst_by=by,
        ),
    )  # fmt: skip
    if with_details:
        report = _with_details(report, options, planned)
    if report.fits or not with_fixes:
        return report

    def again(changed: Options, other: Device) -> PlanReport:
        return make_data_set_plan(changed, other, data, with_fixes=False)

    def shortened(changed: Options, longest: int) -> tuple[str, PlanReport] | None:
        kept = data.no_longer_than(longest)
        if kept is None:
            return None
        left_out = len(data.requests) - len(kept.requests)
        words = f"leave out the {left_out:,} request{'' if left_out == 1 else 's'} of more than {longest:,} tokens"
        return words, make_data_set_plan(changed, device, kept, with_fixes=False)

    return replace(report, fixes=tuple(find_fixes(options, device, report, again, shortened)))


def _with_details(report: PlanReport, options: Options, planned: _Planned) -> PlanReport:
    # Where nothing is scored the model does not run.
    if planned.work is None or planned.rank is None or not planned.work.head.num_rows:
        return report
    return replace(report, timeline=timeline(options, planned.rank, planned.work), tree=prefix_tree(planned.work))


class _Planned:
    """A step planned by a rank on a simulated device.

    Attributes:
        report: What is known of it.
        rank: That would run it; None when not even the weights fit. Its device is closed: it can only be asked.
        work: Of the pass that needs most; when the step does not fit, of the request that cannot run alone.
        refused: Requests of the data set that cannot run alone.
    """

    def __init__(
        self, options: Options, device: Device, runtime: TransformersRuntime, requests: Sequence[Request],
        data: DataSet | None = None,
    ) -> None:  # fmt: skip
        self.rank: TrainerRank | None = None
        self.work: PassWork | None = None
        self.refused: tuple[Refused, ...] = ()
        self.report = self._plan(options, device, runtime, requests, data)

    def _plan(
        self, options: Options, device: Device, runtime: TransformersRuntime, requests: Sequence[Request],
        data: DataSet | None,
    ) -> PlanReport:  # fmt: skip
        facts = runtime.facts
        resident = {
            "CUDA context": device.context_bytes, "library workspace": device.cublas_bytes,
            "weights": facts.weight_bytes,
        }  # fmt: skip
        common: dict[str, Any] = {
            "model": options.model,
            "device": device.name,
            "options": asdict(options),
            "capacity_bytes": device.usable_bytes,
        }
        needed = _beside_passes(device, runtime)

        def weights_alone(why: str) -> PlanReport:
            return PlanReport(
                **common, fits=False, resident=resident, reserve_bytes=0, pending={}, passes=(), worst=None,
                short_bytes=max(1, needed - device.usable_bytes), refusal=why, peak_bytes=needed,
            )  # fmt: skip

        if needed > device.usable_bytes:
            return weights_alone("the weights alone do not fit")
        settings = AllocatorSettings(expandable_segments=expandable_by_environment())
        with Simulated(device, settings=settings) as meter:
            try:
                meter.place([*runtime.model.parameters(), *runtime.model.buffers()])
                reading = meter.read()
                resident["allocator's rounding"] = (
                    reading.resident_bytes - device.context_bytes - facts.weight_bytes
                )  # fmt: skip
                common["resident"] = resident
                common["reserve_bytes"] = reading.reserve_bytes - device.cublas_bytes
                self.rank = rank = TrainerRank(
                    runtime, meter=meter, head_chunk_rows=options.head_chunk_rows,
                    max_packed_tokens=options.max_packed_tokens, caller_bytes_per_token=options.caller_bytes_per_token,
                )  # fmt: skip
                if data is not None:
                    self.refused = refused_alone(rank, data, options.max_packed_tokens)
                    if self.refused:
                        # Planned for its refusal, which names the terms.
                        requests = [data.requests[self.refused[0].request]]
                planned = rank.plan(requests)
                if self.refused:
                    # It fits as the whole of a step, but not beside the gradients of another pass.
                    return self._refused_beside(common, rank, requests)
            except torch.OutOfMemoryError as error:
                return weights_alone(f"the weights alone do not fit: {error}")
            except TrainerRankMemoryError as error:
                report = self._refused(common, requests, error)
                if self.refused and report.refusal is not None:
                    # The rank was asked about this one request only, and calls it by its place in that call.
                    words = report.refusal.removeprefix("request 0")
                    report = replace(report, refusal=self.refused[0].name + words)
                return report
        return self._fits(common, planned)

    def _fits(self, common: dict[str, Any], planned: Sequence[PlannedPass]) -> PlanReport:
        worst = max(planned, key=lambda one: one.admission.charged_bytes, default=None)
        pending = {} if worst is None else _pending(worst)
        passes = tuple(_pass(one.admission.price, one.works, one.stats.requests) for one in planned)
        largest = None
        if worst is not None:
            largest = _pass(worst.admission.price, worst.works, worst.stats.requests)
            self.work = max(worst.works, key=lambda work: work.batch.packed_rows, default=None)
        needed = 0 if largest is None else largest.required_bytes
        return PlanReport(
            **common, fits=True, pending=pending, passes=passes, worst=largest, refusal=None, short_bytes=0,
            peak_bytes=sum(common["resident"].values()) + sum(pending.values()) + needed,
        )  # fmt: skip

    def _refused(
        self, common: dict[str, Any], requests: Sequence[Request], error: TrainerRankMemoryError
    ) -> PlanReport:
        worst, pending, charged = None, {}, 0
        if error.admission is not None:
            charged = error.admission.charged_bytes
            pending = {term.name: term.num_bytes for term in error.admission.pending}
            if error.request_index is not None:
                self.work = pass_work([requests[error.request_index]], [error.request_index])
                worst = _pass(error.admission.price, (self.work,), 1)
        return PlanReport(
            **common, fits=False, pending=pending, passes=(), worst=worst, refusal=str(error),
            short_bytes=error.short_bytes or 0, peak_bytes=sum(common["resident"].values()) + charged,
        )  # fmt: skip

    def _refused_beside(self, common: dict[str, Any], rank: TrainerRank, requests: Sequence[Request]) -> PlanReport:
        (alone,) = rank.plan_alone(requests)
        (self.work,) = alone.works
        name, verdict = self.refused[0].name, alone.admission
        return PlanReport(
            **common, fits=False, pending=_pending(alone), passes=(),
            worst=_pass(verdict.price, alone.works, 1), short_bytes=verdict.short_bytes,
            refusal=f"{name} of {requests[0].num_tokens} tokens fits as a whole step, but not beside the "
            f"gradients of another pass of its step: it {verdict.explain()}",
            peak_bytes=sum(common["resident"].values()) + verdict.charged_bytes,
        )  # fmt: skip


def _beside_passes(device: Device, runtime: TransformersRuntime) -> int:
    """Return what the device holds before any pass, without the allocator's rounding."""
    return device.context_bytes + device.cublas_bytes + runtime.facts.weight_bytes


def _pending(planned: PlannedPass) -> dict[str, int]:
    return {term.name: term.num_bytes for term in planned.admission.pending}


def _pass(price: Price, works: Sequence[PassWork], requests: int) -> PassReport:
    return PassReport(
        requests=requests,
        packed_rows=sum(work.batch.packed_rows for work in works),
        logical_tokens=sum(work.batch.logical_tokens for work in works),
        head_rows=sum(work.head.num_rows for work in works),
        segments=sum(work.batch.num_segments for work in works),
        required_bytes=price.required_bytes,
        retained_bytes=price.retained_bytes,
        phase=price.phase,
        layer=price.layer,
        terms={term.name: term.num_bytes for term in price.terms},
    )
