"""Ranges of units as passes with a price, worked out once each."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainer_rank.admission import Admission, Budget, admit
from trainer_rank.memory import LowerBound, ModelFacts, Price, Term
from trainer_rank.planner import PassWork, pass_work
from trainer_rank.prefix import Layout
from trainer_rank.requests import Request
from trainer_rank.session.pricing import Forward, Pricer
from trainer_rank.session.units import PassKey, Unit, pass_key


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """A range of units as one micro-batch: its passes and what they cost together.

    Attributes:
        indices: Flat indices of its leaves, inactive ones included, in reading order.
        forwards: Its forwards, all alive together.
        price: Price of the passes together.
        layout: Number of its layout among those that are tried.
        recomputed: Layers that run again in backward, where that is chosen for each candidate; None where it is not.
    """

    indices: tuple[int, ...]
    forwards: tuple[Forward, ...]
    price: Price
    layout: int
    recomputed: int | None = None

    @property
    def works(self) -> tuple[PassWork, ...]:
        """Its passes: one per forward, grad mode and adapter; empty when every leaf is inactive."""
        return tuple(work for forward in self.forwards for work in forward.works)

    @property
    def fingerprint(self) -> str:
        """Digest of the shapes of its passes. How many layers are recomputed changes no number, and is not in it."""
        return _fingerprint([_recomputing(work, None) for work in self.works])


class Candidates:
    """Answers ``admission(start, stop)`` for ranges of one group of units.

    Args:
        leaves: All requests of the call.
        units: Units in tree order.
        pricer: Prices forwards.
        layout: Layout every pass must use; None takes the fastest layout that fits.
        max_packed_rows: Hard cap on packed rows of one pass; None for no cap.
        facts: The model.
        recompute_choices: How many of the first layers may run again in backward, ascending, where that is chosen for
            each candidate; empty where it is not.

    Attributes:
        most_recomputed: Larger choices are left out; None leaves out none.
    """

    def __init__(
        self,
        leaves: Sequence[Request],
        units: Sequence[Unit],
        pricer: Pricer,
        layout: Layout | None,
        max_packed_rows: int | None,
        facts: ModelFacts,
        recompute_choices: tuple[int, ...] = (),
    ) -> None:
        self._facts = facts
        self.recompute_choices = recompute_choices
        self.most_recomputed: int | None = None
        self._leaves = leaves
        self._units = units
        self._pricer = pricer
        # Full sharing is last: it has the fewest rows of all.
        self._layouts = (None, Layout.full_sharing()) if layout is None else (layout,)
        self._max_packed_rows = max_packed_rows
        self._works: dict[tuple[int, int, int], tuple[PassWork, ...]] = {}
        self._known: dict[tuple[int, int, int, int | None], Candidate] = {}

    @property
    def num_units(self) -> int:
        """Units in the group."""
        return len(self._units)

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self._facts.num_layers

    @property
    def num_layouts(self) -> int:
        """Layouts that are tried, fastest first."""
        return len(self._layouts)

    def fingerprint(self, start: int, stop: int, layout: int) -> str:
        """Return the digest of the shapes of a range's passes under a layout, by its number; prices nothing."""
        return _fingerprint(self._passes(start, stop, layout))

    def indices(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the flat indices of a range, in reading order."""
        return tuple(sorted(index for unit in self._units[start:stop] for index in unit.indices))

    @property
    def shared_rows(self) -> tuple[int, ...]:
        """What each unit shares with the one before it, in rows."""
        return tuple(unit.shared_rows for unit in self._units)

    def packed_rows(self, start: int, stop: int) -> int:
        """Return the packed rows of a range under its first layout; prices nothing."""
        return sum(work.batch.packed_rows for work in self._passes(start, stop, 0))

    def within_cap(self, start: int, stop: int) -> bool:
        """Return whether the range keeps to the cap on packed rows under some layout; prices nothing."""
        return any(self._is_within_cap(start, stop, number) for number in range(len(self._layouts)))

    def admission(
        self, start: int, stop: int, budget: Budget, pending: tuple[Term, ...], *, layout: int | None = None
    ) -> tuple[Candidate, Admission]:
        """Return the range under the fastest layout that is admitted, else under the cheapest one.

        Where it is chosen how many layers are recomputed, the fewest with which a layout is admitted: recomputing all
        of them takes a third of the time again, and a layout a few rows. A layout that breaks the cap on packed rows
        is not considered, unless all do. With ``layout``, the number of one, only that one is. When a bound rules all
        of them out, only the last is worked out, for the refusal.
        """
        choice: Sequence[int] = range(len(self._layouts)) if layout is None else (layout,)
        numbers = [number for number in choice if self._is_within_cap(start, stop, number)]
        if len(numbers) > 1 and self._ruled_out([(start, stop)], budget, pending):
            numbers = numbers[-1:]
        tried = []
        for recomputed, number in itertools.product(self._recomputed(), numbers or choice[-1:]):
            candidate = self._candidate(start, stop, number, recomputed)
            verdict = admit(candidate.price, budget, pending)
            if verdict.admitted:
                return candidate, verdict
            tried.append((candidate, verdict))
        return min(tried, key=lambda pair: pair[1].charged_bytes)

    def together(self, parts: int, budget: Budget, pending: tuple[Term, ...]) -> tuple[Candidate, Admission]:
        """Return all units in ``parts`` forwards whose graphs stay alive together, under the layout that needs least.

        More parts keep the same bytes alive and need fewer for the one that runs, but share less.
        """
        edges = [self.num_units * part // parts for part in range(parts + 1)]
        ranges = list(itertools.pairwise(edges))
        numbers = range(len(self._layouts))
        if len(numbers) > 1 and self._ruled_out(ranges, budget, pending):
            numbers = numbers[-1:]
        tried = []
        for recomputed in self._recomputed():
            candidates = [self._together(ranges, number, recomputed) for number in numbers]
            tried += [(candidate, admit(candidate.price, budget, pending)) for candidate in candidates]
            if any(verdict.admitted for _, verdict in tried):
                break
        return min(tried, key=lambda pair: pair[1].charged_bytes)

    def _recomputed(self) -> tuple[int | None, ...]:
        """Return the choices of how many layers are recomputed, the fastest first."""
        most = self.most_recomputed
        return tuple(one for one in self.recompute_choices if most is None or one <= most) or (None,)

    def _ruled_out(self, ranges: Sequence[tuple[int, int]], budget: Budget, pending: tuple[Term, ...]) -> bool:
        """Return whether forwards over these ranges cannot fit together under any layout; packs nothing."""
        active = [self._active(start, stop) for start, stop in ranges]
        bound = self._pricer.at_least([requests for requests in active if requests]) if any(active) else None
        return bound is not None and _exceeds(bound, budget, pending)

    def _is_within_cap(self, start: int, stop: int, number: int) -> bool:
        cap = self._max_packed_rows
        return cap is None or all(work.batch.packed_rows <= cap for work in self._passes(start, stop, number))

    def _active(self, start: int, stop: int) -> tuple[Request, ...]:
        leaves = (self._leaves[index] for index in self.indices(start, stop))
        return tuple(request for request in leaves if request.active)

    def _passes(self, start: int, stop: int, number: int) -> tuple[PassWork, ...]:
        """Return one pass per grad mode and adapter."""
        key = (start, stop, number)
        if key not in self._works:
            by_key: dict[PassKey, list[int]] = {}
            for index in self.indices(start, stop):
                if self._leaves[index].active:
                    by_key.setdefault(pass_key(self._leaves[index], self._facts), []).append(index)
            self._works[key] = tuple(
                pass_work(
                    [self._leaves[index] for index in members], members, self._layouts[number], adapter=adapter or None
                )
                for (_, adapter), members in sorted(by_key.items())
            )
        return self._works[key]

    def _candidate(self, start: int, stop: int, number: int, recomputed: int | None) -> Candidate:
        key = (start, stop, number, recomputed)
        if key not in self._known:
            self._known[key] = self._together([(start, stop)], number, recomputed)
        return self._known[key]

    def _together(self, ranges: Sequence[tuple[int, int]], number: int, recomputed: int | None) -> Candidate:
        """Return one forward per range, alive together, as one candidate."""
        forwards = tuple(
            Forward(requests=self._active(start, stop), works=tuple(_recomputing(work, recomputed) for work in works))
            for start, stop in ranges
            if (works := self._passes(start, stop, number))
        )
        if forwards:
            price = self._pricer.price(forwards)
        else:
            nothing = Term(name="nothing", num_bytes=0)
            price = Price(required_bytes=0, retained_bytes=0, terms=(nothing,), phase="none")
        indices = self.indices(ranges[0][0], ranges[-1][1])
        return Candidate(indices=indices, forwards=forwards, price=price, layout=number, recomputed=recomputed)


def _exceeds(bound: LowerBound, budget: Budget, pending: tuple[Term, ...]) -> bool:
    """Return whether what is needed at least does not fit. Only a bound may rule work out, never an estimate."""
    return bound.num_bytes + sum(term.num_bytes for term in pending) > budget.available_bytes


def _recomputing(work: PassWork, recomputed: int | None) -> PassWork:
    """Return the pass with so many of its layers recomputed; one without gradients recomputes nothing."""
    return work if work.no_grad or work.recomputed == recomputed else replace(work, recomputed=recomputed)


def _fingerprint(works: Sequence[PassWork]) -> str:
    return hashlib.blake2b("".join(work.shape_key for work in works).encode(), digest_size=8).hexdigest()
