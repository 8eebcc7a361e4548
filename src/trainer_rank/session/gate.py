"""Plans a batch and admits each pass against memory as it is, or refuses in words."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence

from trainer_rank.admission import Admission, Budget
from trainer_rank.errors import TrainerRankMemoryError
from trainer_rank.memory import Price, Term
from trainer_rank.meters import Meter, Reading
from trainer_rank.planner.fit import PlanQuality, fit_passes
from trainer_rank.requests import Flat
from trainer_rank.runtime import Runtime
from trainer_rank.session.candidates import Candidate, Candidates, Units
from trainer_rank.session.optimizer import Optimizer
from trainer_rank.units import format_bytes

Plan = tuple[list[Units], PlanQuality]
"""Passes over units of one group, and how good they are."""


class Gate:
    """Between a plan and the device: reads the budget, charges what is pending, admits or refuses.

    Args:
        runtime: The model.
        meter: Measures the device.
        optimizer: Its state is charged until it exists.
        max_packed_tokens: Hard cap on packed rows of a pass, for the words of a refusal.
        head_chunk_rows: Likewise.
        record: Hands out the record of a verdict.
    """

    def __init__(
        self,
        runtime: Runtime,
        meter: Meter,
        optimizer: Optimizer,
        *,
        max_packed_tokens: int | None,
        head_chunk_rows: int,
        record: Callable[[Candidate, Admission], int],
    ) -> None:
        self._runtime = runtime
        self._meter = meter
        self._optimizer = optimizer
        self._max_packed_tokens = max_packed_tokens
        self._head_chunk_rows = head_chunk_rows
        self._record = record

    def plan(
        self,
        flat: Flat,
        group: Candidates,
        units: Units,
        budget: Budget,
        *,
        refused: Callable[[TrainerRankMemoryError, int], None],
        split: bool,
        begun: bool = False,
    ) -> Plan:
        """Return passes over the units, each admitted, but for units that cannot fit alone.

        ``refused`` is told of each of these; it may raise.
        """
        while units:
            found = self._fitted(group, units, budget, split=split)
            if not isinstance(found, int):
                return found
            refused(self.refusal(flat, group, found, budget, begun=begun), found)
            units, split = tuple(unit for unit in units if unit != found), True
        return [], PlanQuality()

    def passes(self, group: Candidates, units: Units, budget: Budget, *, split: bool) -> Plan | None:
        """Return passes over the units, each admitted; None when some unit cannot fit alone. Records no refusal."""
        found = self._fitted(group, units, budget, split=split)
        return None if isinstance(found, int) else found

    def _fitted(self, group: Candidates, units: Units, budget: Budget, *, split: bool) -> Plan | int:
        """Return passes over the units, each admitted, or a unit that cannot fit alone."""
        computing = tuple(unit for unit in units if group.computes(unit))
        idle = tuple(unit for unit in units if not group.computes(unit))
        if not computing:
            return [idle], PlanQuality(passes=1, bound_passes=1)

        def chosen(numbers: Sequence[int]) -> Units:
            # What computes nothing rides with the first pass: it costs nothing and must be handed out once.
            along = idle if numbers[0] == 0 else ()
            return tuple(sorted((*along, *(computing[number] for number in numbers))))

        def fill(numbers: Sequence[int]) -> float:
            some = chosen(numbers)
            if not group.within_cap(some):
                return math.inf
            whole = not split and len(some) == group.num_units
            pending = self.pending(split=not whole)
            _, verdict = group.admission(some, budget, pending)
            room = budget.available_bytes - sum(term.num_bytes for term in pending)
            if verdict.admitted:
                return min(1.0, verdict.price.required_bytes / room) if room > 0 else 0.0
            return max(1.0 + 1e-9, verdict.price.required_bytes / room) if room > 0 else math.inf

        sharing = group.sharing.of(computing)
        found = fit_passes(sharing, fill, most_rows=self._max_packed_tokens, pass_rows=group.speed.pass_rows)
        if isinstance(found, int):
            return computing[found]
        return [chosen(numbers) for numbers in found.passes], found.quality(sharing)

    def refusal(
        self, flat: Flat, group: Candidates, unit: int, budget: Budget, *, begun: bool
    ) -> TrainerRankMemoryError:
        """Record the refusal of a unit that cannot fit alone and return its error."""
        candidate, verdict = group.admission((unit,), budget, self.pending(split=True))
        self._record(candidate, verdict)
        indices = candidate.indices
        blamed = max(indices, key=lambda index: flat.leaves[index].num_tokens)
        length = flat.leaves[blamed].num_tokens
        who = f"request {blamed} of {length} tokens"
        if len(indices) > 1:
            who += f" and the {len(indices) - 1} requests of its atomic group"
        outcome = "Earlier micro-batches keep their gradients" if begun else "Nothing ran"
        if not group.within_cap((unit,)):
            rows = max(work.batch.packed_rows for work in candidate.works)
            return TrainerRankMemoryError(
                f"{who} cannot run alone: it takes {rows} packed rows and max_packed_tokens is "
                f"{self._max_packed_tokens}. {outcome}. Raise max_packed_tokens or drop the request",
                admission=verdict, refused=True, phase="planning", term="max_packed_tokens",
                request_index=blamed, request_length=length,
            )  # fmt: skip
        return TrainerRankMemoryError(
            f"{who} cannot fit alone: it {verdict.explain()}; {format_bytes(verdict.short_bytes)} short. "
            f"{outcome}. {self._advice(verdict)}",
            admission=verdict, refused=True, phase=verdict.price.phase, term=verdict.largest_term.name,
            short_bytes=verdict.short_bytes, request_index=blamed, request_length=length,
        )  # fmt: skip

    def admit_together(self, flat: Flat, group: Candidates) -> tuple[Candidate, Admission]:
        """Return all units as forwards alive together, admitted; as few forwards as fit.

        Raises:
            TrainerRankMemoryError: They do not fit in any number of forwards.
        """
        pending, parts = self.pending(split=False), 1
        best: tuple[Candidate, Admission] | None = None
        while True:
            budget = budget_of(self._meter.prepare(None if best is None else best[1].charged_bytes))
            candidate, verdict = group.together(parts, budget, pending)
            if best is None or verdict.charged_bytes < best[1].charged_bytes:
                best = candidate, verdict
            if verdict.admitted:
                return candidate, verdict
            if parts >= group.num_units:
                break
            parts = min(2 * parts, group.num_units)
        candidate, verdict = best
        self._record(candidate, verdict)
        advice = self._advice(verdict)
        raise TrainerRankMemoryError(
            f"{len(flat.leaves)} requests cannot be alive together: their forwards {verdict.explain()}; "
            f"{format_bytes(verdict.short_bytes)} short. Nothing ran. Use forward_micro_batches, which frees each "
            f"micro-batch before the next, or {advice[0].lower()}{advice[1:]}",
            admission=verdict, refused=True, phase=verdict.price.phase, term=verdict.largest_term.name,
            short_bytes=verdict.short_bytes,
        )  # fmt: skip

    def refusal_to_repeat(self, candidate: Candidate, verdict: Admission) -> TrainerRankMemoryError:
        """Record the refusal of a recorded pass that memory has no room for any more, and return its error."""
        self._record(candidate, verdict)
        return TrainerRankMemoryError(
            f"the recorded pass over {len(candidate.indices)} requests cannot be repeated: it {verdict.explain()}; "
            f"{format_bytes(verdict.short_bytes)} short. It did not run. Raise memory_budget by at least "
            f"{format_bytes(verdict.short_bytes)} to repeat it exactly, or leave the recorded split out to have the "
            "requests split anew",
            admission=verdict, refused=True, phase=verdict.price.phase, term=verdict.largest_term.name,
            short_bytes=verdict.short_bytes,
        )  # fmt: skip

    def _advice(self, verdict: Admission) -> str:
        """Return the next step that costs least."""
        raise_it = f"raise memory_budget by at least {format_bytes(verdict.short_bytes)}"
        if self._runtime.recompute == "none":
            return f"Set recompute='full', or {raise_it}"
        from_head = "head" in (verdict.price.phase, verdict.largest_term.name)
        if from_head and self._head_chunk_rows > 64:
            return f"Lower head_chunk_rows from {self._head_chunk_rows}, or {raise_it}"
        return raise_it[0].upper() + raise_it[1:]

    def check_budget(self) -> None:
        reading = self._meter.prepare()
        if reading.available_bytes > 0:
            return
        budget = budget_of(reading)
        weights = self._runtime.facts.weight_bytes
        needed = reading.resident_bytes + reading.reserve_bytes
        raise TrainerRankMemoryError(
            f"memory_budget must exceed what is resident before any pass, got {format_bytes(budget.budget_bytes)} with "
            f"{format_bytes(budget.resident_bytes)} resident ({format_bytes(weights)} of it weights) and a reserve of "
            f"{format_bytes(reading.reserve_bytes)}; a budget is all bytes on the device, weights included. Set it "
            f"above {format_bytes(needed)}",
            admission=Admission(price=no_price(), budget=budget), refused=True, phase="loading", term="weights",
            short_bytes=max(1, needed - budget.budget_bytes),
        )  # fmt: skip

    def read_budget(self, *, collect: bool = False) -> Budget:
        """Return what the device can give now, after collecting reference cycles if it is asked for."""
        if collect:
            gc.collect()
        return budget_of(self._meter.prepare())

    def pending(self, *, split: bool) -> tuple[Term, ...]:
        """Return what is not allocated yet but will stand beside later passes."""
        parameters = self._runtime.trainable_parameters()
        facts, terms = self._runtime.facts, []
        if not parameters:
            return ()
        if not self._optimizer.exists:
            terms.append(Term(name="optimizer state to come", num_bytes=facts.adam_state_bytes))
        to_come = sum(one.numel() * one.element_size() for one in parameters if one.grad is None)
        if split and to_come:
            terms.append(Term(name="gradients to come", num_bytes=to_come))
        return tuple(terms)

    def readmit(
        self, group: Candidates, units: Units, *, split: bool, layout: int | None = None
    ) -> tuple[Candidate, Admission]:
        """Return the verdict on a planned pass against memory as it is now, under ``layout`` only if it is given."""
        pending = self.pending(split=split)
        candidate, verdict = group.admission(units, budget_of(self._meter.read()), pending, layout=layout)
        for collect in (False, True):
            if collect:
                gc.collect()
            # The meter gives cached blocks back only when this pass needs them.
            budget = budget_of(self._meter.prepare(verdict.charged_bytes))
            candidate, verdict = group.admission(units, budget, pending, layout=layout)
            if verdict.admitted:
                break
        return candidate, verdict


def budget_of(reading: Reading) -> Budget:
    """Return what an admission needs of a reading. Blocks cached for reuse are not held against a pass."""
    cached = reading.reserved_bytes - reading.allocated_bytes
    return Budget(
        budget_bytes=reading.budget_bytes,
        resident_bytes=max(0, reading.resident_bytes - cached),
        available_bytes=reading.available_bytes,
    )


def no_price() -> Price:
    """Return the price of running nothing."""
    return Price(required_bytes=0, retained_bytes=0, terms=(Term(name="nothing", num_bytes=0),), phase="none")
