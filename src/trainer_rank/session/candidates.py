"""Ranges of units as passes with a price, worked out once each."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer_rank.admission import Admission, Budget, admit
from trainer_rank.memory import ModelFacts, Price, Term, combine
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
        layout: Number of its layout among those that are tried.
    """

    indices: tuple[int, ...]
    works: tuple[PassWork, ...]
    price: Price
    layout: int

    @property
    def fingerprint(self) -> str:
        """Digest of the shapes of its passes."""
        return _fingerprint(self.works)


class Candidates:
    """Answers ``admission(start, stop)`` for ranges of one group of units.

    Args:
        leaves: All requests of the call.
        units: Units in tree order.
        pricer: Prices one pass.
        layout: Layout every pass must use; None takes the fastest layout that fits.
        max_packed_rows: Hard cap on packed rows of one pass; None for no cap.
        facts: The model.
    """

    def __init__(
        self,
        leaves: Sequence[Request],
        units: Sequence[Unit],
        pricer: Pricer,
        layout: Layout | None,
        max_packed_rows: int | None,
        facts: ModelFacts,
    ) -> None:
        self._facts = facts
        self._leaves = leaves
        self._units = units
        self._pricer = pricer
        # Full sharing is last: it has the fewest rows of all.
        self._layouts = (None, Layout.full_sharing()) if layout is None else (layout,)
        self._max_packed_rows = max_packed_rows
        self._works: dict[tuple[int, int, int], tuple[PassWork, ...]] = {}
        self._known: dict[tuple[int, int, int], Candidate] = {}

    @property
    def num_units(self) -> int:
        """Units in the group."""
        return len(self._units)

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

        A layout that breaks the cap on packed rows is not considered, unless all do. With ``layout``, the number of
        one, only that one is.
        """
        choice = range(len(self._layouts)) if layout is None else (layout,)
        numbers = [number for number in choice if self._is_within_cap(start, stop, number)]
        tried = []
        for number in numbers or choice[-1:]:
            candidate = self._candidate(start, stop, number)
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
        tried = []
        for number in range(len(self._layouts)):
            ranges = list(itertools.pairwise(edges))
            works = tuple(work for start, stop in ranges for work in self._passes(start, stop, number))
            candidate = self._together(works, self.indices(0, self.num_units), number)
            tried.append((candidate, admit(candidate.price, budget, pending)))
        return min(tried, key=lambda pair: pair[1].charged_bytes)

    def _is_within_cap(self, start: int, stop: int, number: int) -> bool:
        cap = self._max_packed_rows
        return cap is None or all(work.batch.packed_rows <= cap for work in self._passes(start, stop, number))

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

    def _candidate(self, start: int, stop: int, number: int) -> Candidate:
        key = (start, stop, number)
        if key not in self._known:
            works = self._passes(start, stop, number)
            self._known[key] = self._together(works, self.indices(start, stop), number)
        return self._known[key]

    def _together(self, works: tuple[PassWork, ...], indices: tuple[int, ...], number: int) -> Candidate:
        """Return passes that are alive together as one candidate."""
        if works:
            # A pass leaves gradients behind for the passes whose backward comes after its own.
            several = sum(not work.no_grad for work in works) > 1
            left = self._facts.trainable_bytes if several else 0
            price = combine([self._pricer(work) for work in works], left_bytes=left)
        else:
            nothing = Term(name="nothing", num_bytes=0)
            price = Price(required_bytes=0, retained_bytes=0, terms=(nothing,), phase="none")
        return Candidate(indices=indices, works=works, price=price, layout=number)


def _fingerprint(works: Sequence[PassWork]) -> str:
    return hashlib.blake2b("".join(work.shape_key for work in works).encode(), digest_size=8).hexdigest()
