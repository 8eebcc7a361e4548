"""Plans a batch and admits each pass against memory as it is, or refuses in words."""

from __future__ import annotations

import gc
from collections.abc import Callable

from trainer_rank.admission import Admission, Budget
from trainer_rank.errors import TrainerRankMemoryError
from trainer_rank.memory import Price, Term
from trainer_rank.meters import Meter, Reading
from trainer_rank.planner.greedy import split_greedily
from trainer_rank.requests import Flat
from trainer_rank.runtime import Runtime
from trainer_rank.session.candidates import Candidate, Candidates
from trainer_rank.session.optimizer import Optimizer
from trainer_rank.units import format_bytes


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
        # Bytes per packed row of the pass priced last: only a guess of where to ask first.
        self._bytes_per_row: float | None = None

    def plan(
        self,
        flat: Flat,
        group: Candidates,
        start: int,
        stop: int,
        budget: Budget,
        *,
        refused: Callable[[TrainerRankMemoryError, int], None],
        split: bool,
        begun: bool = False,
    ) -> list[tuple[int, int]]:
        """Return ranges covering the units ``[start, stop)``, each admitted, but for those that cannot fit alone.

        ``refused`` is told of each of these; it may raise.
        """
        found: list[tuple[int, int]] = []
        while start < stop:
            ranges = self._split(group, start, stop, budget, split=split)
            if not isinstance(ranges, int):
                return found + ranges
            refused(self.refusal(flat, group, ranges, budget, begun=begun), ranges)
            if start < ranges:
                found += self.plan(flat, group, start, ranges, budget, refused=refused, split=True, begun=begun)
            start, split = ranges + 1, True
        return found

    def ranges(
        self, group: Candidates, start: int, stop: int, budget: Budget, *, split: bool
    ) -> list[tuple[int, int]] | None:
        """Return ranges covering the units, each admitted; None when some unit cannot fit alone. Records no refusal."""
        found = self._split(group, start, stop, budget, split=split)
        return None if isinstance(found, int) else found

    def _split(
        self, group: Candidates, start: int, stop: int, budget: Budget, *, split: bool
    ) -> list[tuple[int, int]] | int:
        """Return ranges covering the units, each admitted, or a unit that cannot fit alone."""

        def fits(begin: int, end: int) -> bool:
            whole = not split and start + begin == 0 and start + end == group.num_units
            if not group.within_cap(start + begin, start + end):
                return False
            candidate, verdict = group.admission(start + begin, start + end, budget, self.pending(split=not whole))
            rows = sum(work.batch.packed_rows for work in candidate.works)
            if rows:
                self._bytes_per_row = verdict.price.required_bytes / rows
            return verdict.admitted

        def guess(begin: int) -> int:
            return min(stop, self._probable_stop(group, start + begin, budget)) - start

        ranges = split_greedily(stop - start, fits, shared=group.shared_rows[start:stop], guess=guess)
        if isinstance(ranges, int):
            return start + ranges
        return [(start + begin, start + end) for begin, end in ranges]

    def _probable_stop(self, group: Candidates, start: int, budget: Budget) -> int:
        """Return how far a range from ``start`` probably fits, from the rate of the pass priced last."""
        low, high = start + 1, group.num_units
        rate = self._bytes_per_row
        if rate is None:
            return high
        room = budget.available_bytes - sum(term.num_bytes for term in self.pending(split=True))
        while low < high:
            middle = (low + high + 1) // 2
            if group.packed_rows(start, middle) * rate <= room:
                low = middle
            else:
                high = middle - 1
        return low

    def refusal(
        self, flat: Flat, group: Candidates, unit: int, budget: Budget, *, begun: bool
    ) -> TrainerRankMemoryError:
        """Record the refusal of a unit that cannot fit alone and return its error."""
        candidate, verdict = group.admission(unit, unit + 1, budget, self.pending(split=True))
        self._record(candidate, verdict)
        indices = candidate.indices
        blamed = max(indices, key=lambda index: flat.leaves[index].num_tokens)
        length = flat.leaves[blamed].num_tokens
        who = f"request {blamed} of {length} tokens"
        if len(indices) > 1:
            who += f" and the {len(indices) - 1} requests of its atomic group"
        outcome = "Earlier micro-batches keep their gradients" if begun else "Nothing ran"
        if not group.within_cap(unit, unit + 1):
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

    def forget(self) -> None:
        """Forget the pass priced last, so that a split depends on its requests and on memory only, not on history."""
        self._bytes_per_row = None

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

    def read_budget(self) -> Budget:
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
        self, group: Candidates, start: int, stop: int, *, split: bool, layout: int | None = None
    ) -> tuple[Candidate, Admission]:
        """Return the verdict on a planned range against memory as it is now, under ``layout`` only if it is given."""
        pending = self.pending(split=split)
        candidate, verdict = group.admission(start, stop, budget_of(self._meter.read()), pending, layout=layout)
        for collect in (False, True):
            if collect:
                gc.collect()
            # The meter gives cached blocks back only when this pass needs them.
            budget = budget_of(self._meter.prepare(verdict.charged_bytes))
            candidate, verdict = group.admission(start, stop, budget, pending, layout=layout)
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
