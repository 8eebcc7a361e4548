"""One call of ``forward_micro_batches``: planned whole, then run micro-batch by micro-batch, the largest first.

The largest goes first because what it leaves in the allocator's cache serves all that come after it, and because a
refusal or an out-of-memory that must come then comes before the others have been paid for.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

from trainer_rank.admission import Admission, Budget
from trainer_rank.errors import TrainerRankMemoryError
from trainer_rank.planner.recompute import layer_rows
from trainer_rank.requests import Flat, Normaliser, normaliser
from trainer_rank.session.candidates import Candidate, Candidates
from trainer_rank.session.execution import Execution
from trainer_rank.session.gate import Gate
from trainer_rank.session.micro_batch import MicroBatch
from trainer_rank.session.split import SplitRange, check_split


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A request that was left out because it cannot fit.

    Attributes:
        index: Flat index.
        num_tokens: Its length.
        reason: Why, in words.
    """

    index: int
    num_tokens: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """A range as it is to run; ``recorded`` when it must run under its layout or not at all."""

    range: SplitRange
    charged_bytes: int
    recorded: bool


class Call:
    """Plans and runs one call.

    Args:
        flat: The requests.
        groups: Their units by the passes they need.
        gate: Admits and refuses.
        skip: Leave out a unit that cannot fit, instead of raising.
        recorded: Ranges that must run as they are; what they leave is planned.

    Attributes:
        skipped: Requests left out so far.

    Raises:
        RequestError: ``recorded`` is of other requests.
    """

    def __init__(
        self,
        flat: Flat,
        groups: Sequence[Candidates],
        gate: Gate,
        *,
        skip: bool = False,
        recorded: Sequence[SplitRange] = (),
    ) -> None:
        check_split(groups, recorded)
        self.skipped: list[Skipped] = []
        self._flat = flat
        self._groups = groups
        self._gate = gate
        self._skip = skip
        self._recorded = tuple(recorded)

    def plan(self) -> tuple[list[_Planned], bool, Budget]:
        """Return what is to run, in order, whether it is more than one micro-batch, and the budget read.

        Raises:
            TrainerRankMemoryError: A unit cannot fit alone, and none is to be skipped.
        """
        self._gate.forget()
        budget = self._gate.read_budget()
        split = len(self._groups) > 1 or len(self._recorded) > 1
        fresh = self._fresh(budget, split=split)
        if any(group.recompute_choices for group in self._groups):
            fresh = self._fastest(fresh, budget, split=split)
        split = split or len(fresh) + len(self._recorded) > 1
        again = [_Planned(range=one, charged_bytes=0, recorded=True) for one in self._recorded]
        return again + self._ordered(fresh, budget, split=split), split, budget

    def _fresh(self, budget: Budget, *, split: bool) -> list[tuple[int, int, int]]:
        """Return (group, start, stop) of what no recorded range covers, cut so that it fits."""
        return [
            (number, *one)
            for number in range(len(self._groups))
            for start, stop in self._left(number)
            for one in self._cut(number, start, stop, budget, split=split)
        ]

    def _fastest(
        self, widest: list[tuple[int, int, int]], budget: Budget, *, split: bool
    ) -> list[tuple[int, int, int]]:
        """Return the ranges with the least predicted time, among cuts that let fewer and fewer layers be recomputed.

        The widest ranges share the most and recompute the most; narrower ones leave room to keep activations.
        """
        best, least = widest, self._time(widest, budget, split=split)
        for most in self._groups[0].recompute_choices[-2::-1]:
            self._limit(most)
            try:
                ranges = self._within_limit(budget, split=split)
                time = None if ranges is None else self._time(ranges, budget, split=split)
            finally:
                self._limit(None)
            if ranges is None or time is None:
                # Some request needs more layers recomputed than this; it would with fewer, too.
                break
            if time < least:
                best, least = ranges, time
        return best

    def _within_limit(self, budget: Budget, *, split: bool) -> list[tuple[int, int, int]] | None:
        """Return what ``_fresh`` does, under the limit in force; None when some unit does not fit. Refuses nothing."""
        found: list[tuple[int, int, int]] = []
        for number, group in enumerate(self._groups):
            for start, stop in self._left(number):
                ranges = self._gate.ranges(group, start, stop, budget, split=split)
                if ranges is None:
                    return None
                found += [(number, *one) for one in ranges]
        return found

    def _limit(self, most: int | None) -> None:
        for group in self._groups:
            group.most_recomputed = most

    def _time(self, ranges: Sequence[tuple[int, int, int]], budget: Budget, *, split: bool) -> int:
        """Return the predicted time of ranges, each with as few recomputed layers as fit."""
        pending = self._gate.pending(split=split or len(ranges) > 1)
        candidates = (self._groups[number].admission(start, stop, budget, pending)[0] for number, start, stop in ranges)
        return sum(layer_rows(one.works, self._groups[0].num_layers) for one in candidates)

    def planned(self) -> Iterator[tuple[Candidate, Admission]]:
        """Yield the passes and the verdict of each planned micro-batch, in the order they would run."""
        plan, split, budget = self.plan()
        pending = self._gate.pending(split=split)
        for one in plan:
            yield self._groups[one.range.group].admission(one.range.start, one.range.stop, budget, pending)

    def run(self, execution: Execution, rule: Normaliser) -> Generator[MicroBatch]:
        """Yield the micro-batches; a coefficient counts no request that the plan leaves out."""
        later, split, _ = self.plan()
        if self.skipped:
            left_out = {one.index for one in self.skipped}
            rule = normaliser(self._flat.leaves, rule.kind, left_out=left_out)
        done: list[SplitRange] = []
        while later:
            planned = later.pop(0)
            one, group = planned.range, self._groups[planned.range.group]
            layout = one.layout if planned.recorded else None
            candidate, verdict = self._gate.readmit(group, one.start, one.stop, split=split, layout=layout)
            if not verdict.admitted:
                if planned.recorded:
                    raise self._gate.refusal_to_repeat(candidate, verdict)
                # The caller kept memory, or another process took some: this range is cut anew.
                split = True
                cut = self._cut(one.group, one.start, one.stop, verdict.budget, split=True, begun=True)
                later = self._ordered([(one.group, *part) for part in cut], verdict.budget, split=True) + later
                continue
            ran = SplitRange.of(one.group, one.start, one.stop, candidate)
            whole = (*done, ran, *(other.range for other in later))
            yield from execution.run(self._flat, rule, candidate, verdict, split=whole)
            done.append(ran)

    def _left(self, number: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of a group's units that no recorded range covers."""
        start = 0
        for one in sorted((one for one in self._recorded if one.group == number), key=lambda one: one.start):
            if start < one.start:
                yield start, one.start
            start = one.stop
        if start < self._groups[number].num_units:
            yield start, self._groups[number].num_units

    def _cut(
        self, number: int, start: int, stop: int, budget: Budget, *, split: bool, begun: bool = False
    ) -> list[tuple[int, int]]:
        """Return ranges that fit and cover units ``[start, stop)`` of a group, but for those that are skipped."""
        group = self._groups[number]

        def refused(error: TrainerRankMemoryError, unit: int) -> None:
            if not self._skip:
                raise error
            for index in group.indices(unit, unit + 1):
                length = self._flat.leaves[index].num_tokens
                self.skipped.append(Skipped(index=index, num_tokens=length, reason=str(error)))

        return self._gate.plan(self._flat, group, start, stop, budget, refused=refused, split=split, begun=begun)

    def _ordered(self, ranges: Sequence[tuple[int, int, int]], budget: Budget, *, split: bool) -> list[_Planned]:
        """Return (group, start, stop) as they would run under ``budget``, the largest first, equals in tree order."""
        pending = self._gate.pending(split=split)
        found = []
        for number, start, stop in ranges:
            candidate, verdict = self._groups[number].admission(start, stop, budget, pending)
            one = SplitRange.of(number, start, stop, candidate)
            found.append(_Planned(range=one, charged_bytes=verdict.charged_bytes, recorded=False))
        return sorted(found, key=lambda planned: -planned.charged_bytes)


class MicroBatches(Iterator[MicroBatch]):
    """The micro-batches of one call, as they run.

    Attributes:
        skipped: Requests left out because they cannot fit; complete once the iteration has begun, unless memory shrinks
            later.
    """

    def __init__(self, call: Call, run: Generator[MicroBatch]) -> None:
        self._call = call
        self._run = run

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Requests left out so far."""
        return tuple(self._call.skipped)

    def __next__(self) -> MicroBatch:
        return next(self._run)

    def close(self) -> None:
        """Stop here: what has not run will not."""
        self._run.close()
