"""Ranges of units as passes with a price, worked out once each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer_rank.admission import Admission, Budget, admit
from trainer_rank.memory import Price, Term, combine
from trainer_rank.planner import PassWork, pass_work
from trainer_rank.prefix import Layout
from trainer_rank.requests import Request
from trainer_rank.session.units import PassKey, Unit, pass_key

Pricer = Callable[[PassWork], Price]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """A range of units as one micro-batch: its passes and what they cost together.

    Attributes:
        indices: Flat indices of its leaves, inactive ones included, in reading order.
        works: One pass per grad mode and adapter; empty when every leaf is inactive.
        price: Price of the passes together.
    """

    indices: tuple[int, ...]
    works: tuple[PassWork, ...]
    price: Price


class Candidates:
    """Answers ``admission(start, stop)`` for ranges of one group of units.

    Args:
        leaves: All requests of the call.
        units: Units in tree order.
        pricer: Prices one pass.
        layout: Layout every pass must use; None takes the fastest layout that fits.
    """

    def __init__(self, leaves: Sequence[Request], units: Sequence[Unit], pricer: Pricer, layout: Layout | None) -> None:
        self._leaves = leaves
        self._units = units
        self._pricer = pricer
        self._layouts = (None, Layout.full_sharing()) if layout is None else (layout,)
        self._known: dict[tuple[int, int, int], Candidate] = {}

    @property
    def num_units(self) -> int:
        """Units in the group."""
        return len(self._units)

    def indices(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the flat indices of a range, in reading order."""
        return tuple(sorted(index for unit in self._units[start:stop] for index in unit.indices))

    def admission(
        self, start: int, stop: int, budget: Budget, pending: tuple[Term, ...]
    ) -> tuple[Candidate, Admission]:
        """Return the range under the fastest layout that is admitted, else under the cheapest one."""
        tried = []
        for number in range(len(self._layouts)):
            candidate = self._candidate(start, stop, number)
            verdict = admit(candidate.price, budget, pending)
            if verdict.admitted:
                return candidate, verdict
            tried.append((candidate, verdict))
        return min(tried, key=lambda pair: pair[1].charged_bytes)

    def _candidate(self, start: int, stop: int, number: int) -> Candidate:
        key = (start, stop, number)
        if key not in self._known:
            self._known[key] = self._build(self.indices(start, stop), self._layouts[number])
        return self._known[key]

    def _build(self, indices: tuple[int, ...], layout: Layout | None) -> Candidate:
        by_key: dict[PassKey, list[int]] = {}
        for index in indices:
            if self._leaves[index].active:
                by_key.setdefault(pass_key(self._leaves[index]), []).append(index)
        works = tuple(
            pass_work([self._leaves[index] for index in members], members, layout)
            for _, members in sorted(by_key.items())
        )
        if works:
            price = combine([self._pricer(work) for work in works])
        else:
            price = Price(required_bytes=0, retained_bytes=0, terms=(Term(name="nothing", num_bytes=0),), phase="none")
        return Candidate(indices=indices, works=works, price=price)
