"""One call of ``forward_micro_batches``: planned whole, then run micro-batch by micro-batch, the largest first.

The largest goes first because what it leaves in the allocator's cache serves all that come after it, and because a
refusal or an out-of-memory that must come then comes before the others have been paid for.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

from trainer_rank.admission import Admission, Budget
from trainer_rank.errors import TrainerRankMemoryError
from trainer_rank.planner.fit import PlanQuality
from trainer_rank.requests import Flat, Normaliser, normaliser
from trainer_rank.session.candidates import Candidate, Candidates, Units
from trainer_rank.session.execution import Execution
from trainer_rank.session.gate import Gate, Plan
from trainer_rank.session.micro_batch import MicroBatch
from trainer_rank.session.split import SplitPart, check_split


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


Pass = tuple[int, Units]
"""Number of a group, and units of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """A micro-batch as it is to run; ``recorded`` when it must run under its layout or not at all."""

    part: SplitPart
    charged_bytes: int
    recorded: bool


class Call:
    """Plans and runs one call.

    Args:
        flat: The requests.
        groups: Their units by the passes they need.
        gate: Admits and refuses.
        skip: Leave out a unit that cannot fit, instead of raising.
        recorded: Micro-batches that must run as they are; what they leave is planned.

    Attributes:
        skipped: Requests left out so far.
        quality: How good the plan is of what was not recorded; None before it is made.

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
        recorded: Sequence[SplitPart] = (),
    ) -> None:
        check_split(groups, recorded)
        self.skipped: list[Skipped] = []
        self.quality: PlanQuality | None = None
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
        split = len(self._groups) > 1 or len(self._recorded) > 1
        budget = self._gate.read_budget()
        if not self._fits_whole(budget, split=split):
            # Graphs that only the collector finds stand in the way of wider passes; a step of several pays for it.
            budget = self._gate.read_budget(collect=True)
        fresh, self.quality = self._fresh(budget, split=split)
        if any(group.recompute_choices for group in self._groups):
            fresh, self.quality = self._fastest(fresh, self.quality, budget, split=split)
        split = split or len(fresh) + len(self._recorded) > 1
        again = [_Planned(part=one, charged_bytes=0, recorded=True) for one in self._recorded]
        return again + self._ordered(fresh, budget, split=split), split, budget

    def _fits_whole(self, budget: Budget, *, split: bool) -> bool:
        """Return whether each group fits into one pass."""
        pending = self._gate.pending(split=split)
        return all(group.admission(group.everything, budget, pending)[1].admitted for group in self._groups)

    def _fresh(self, budget: Budget, *, split: bool) -> tuple[list[Pass], PlanQuality]:
        """Return passes over what no recorded one covers, which fit, and how good they are."""
        found: list[Pass] = []
        quality = PlanQuality()
        for number in range(len(self._groups)):
            passes, one = self._cut(number, self._left(number), budget, split=split)
            found += [(number, units) for units in passes]
            quality += one
        return found, quality

    def _fastest(
        self, widest: list[Pass], quality: PlanQuality, budget: Budget, *, split: bool
    ) -> tuple[list[Pass], PlanQuality]:
        """Return the passes with the least predicted time, among plans that let fewer and fewer layers be recomputed.

        The widest passes share the most and recompute the most; narrower ones leave room to keep activations.
        """
        best, least = widest, self._time(widest, budget, split=split)
        for most in self._groups[0].recompute_choices[-2::-1]:
            self._limit(most)
            try:
                found = self._within_limit(budget, split=split)
                time = None if found is None else self._time(found[0], budget, split=split)
            finally:
                self._limit(None)
            if found is None or time is None:
                # Some request needs more layers recomputed than this; it would with fewer, too.
                break
            if time < least:
                (best, quality), least = found, time
        return best, quality

    def _within_limit(self, budget: Budget, *, split: bool) -> tuple[list[Pass], PlanQuality] | None:
        """Return what ``_fresh`` does, under the limit in force; None when some unit does not fit. Refuses nothing."""
        found: list[Pass] = []
        quality = PlanQuality()
        for number, group in enumerate(self._groups):
            if not (left := self._left(number)):
                continue
            plan = self._gate.passes(group, left, budget, split=split)
            if plan is None:
                return None
            found += [(number, units) for units in plan[0]]
            quality += plan[1]
        return found, quality

    def _limit(self, most: int | None) -> None:
        for group in self._groups:
            group.most_recomputed = most

    def _time(self, passes: Sequence[Pass], budget: Budget, *, split: bool) -> float:
        """Return the predicted time of passes, each with as few recomputed layers as fit."""
        group, pending = self._groups[0], self._gate.pending(split=split or len(passes) > 1)
        candidates = (self._groups[number].admission(units, budget, pending)[0] for number, units in passes)
        return sum(group.speed.time(one.works, group.num_layers) for one in candidates)

    def planned(self) -> Iterator[tuple[Candidate, Admission]]:
        """Yield the passes and the verdict of each planned micro-batch, in the order they would run."""
        plan, split, budget = self.plan()
        pending = self._gate.pending(split=split)
        for one in plan:
            yield self._groups[one.part.group].admission(one.part.numbers, budget, pending)

    def run(self, execution: Execution, rule: Normaliser) -> Generator[MicroBatch]:
        """Yield the micro-batches; a coefficient counts no request that the plan leaves out."""
        later, split, _ = self.plan()
        if self.skipped:
            left_out = {one.index for one in self.skipped}
            rule = normaliser(self._flat.leaves, rule.kind, left_out=left_out)
        done: list[SplitPart] = []
        while later:
            planned = later.pop(0)
            one, group = planned.part, self._groups[planned.part.group]
            layout = one.layout if planned.recorded else None
            candidate, verdict = self._gate.readmit(group, one.numbers, split=split, layout=layout)
            if not verdict.admitted:
                if planned.recorded:
                    raise self._gate.refusal_to_repeat(candidate, verdict)
                # The caller kept memory, or another process took some: these units are planned anew.
                split = True
                cut, _ = self._cut(one.group, one.numbers, verdict.budget, split=True, begun=True)
                later = self._ordered([(one.group, units) for units in cut], verdict.budget, split=True) + later
                continue
            ran = SplitPart.of(one.group, one.numbers, candidate)
            whole = (*done, ran, *(other.part for other in later))
            yield from execution.run(self._flat, rule, candidate, verdict, split=whole)
            done.append(ran)

    def _left(self, number: int) -> Units:
        """Return a group's units that no recorded micro-batch covers."""
        covered = {unit for one in self._recorded if one.group == number for unit in one.numbers}
        return tuple(unit for unit in self._groups[number].everything if unit not in covered)

    def _cut(self, number: int, units: Units, budget: Budget, *, split: bool, begun: bool = False) -> Plan:
        """Return passes that fit over units of a group, but for those that are skipped."""
        group = self._groups[number]

        def refused(error: TrainerRankMemoryError, unit: int) -> None:
            if not self._skip:
                raise error
            for index in group.indices((unit,)):
                length = self._flat.leaves[index].num_tokens
                self.skipped.append(Skipped(index=index, num_tokens=length, reason=str(error)))

        return self._gate.plan(self._flat, group, units, budget, refused=refused, split=split, begun=begun)

    def _ordered(self, passes: Sequence[Pass], budget: Budget, *, split: bool) -> list[_Planned]:
        """Return passes as they would run under ``budget``, the largest first, equals in tree order."""
        pending = self._gate.pending(split=split)
        found = []
        for number, units in passes:
            candidate, verdict = self._groups[number].admission(units, budget, pending)
            one = SplitPart.of(number, units, candidate)
            found.append(_Planned(part=one, charged_bytes=verdict.charged_bytes, recorded=False))
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

    @property
    def quality(self) -> PlanQuality | None:
        """How good the plan is: its rows and passes beside what no plan falls below; None before the iteration begins.

        What is repeated by a recorded split is not in it.
        """
        return self._call.quality

    def __next__(self) -> MicroBatch:
        return next(self._run)

    def close(self) -> None:
        """Stop here: what has not run will not."""
        self._run.close()
