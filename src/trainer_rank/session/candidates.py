"""Sets of units as passes with a price, worked out once each."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainer_rank.admission import Admission, Budget, admit
from trainer_rank.memory import LowerBound, ModelFacts, Price, Term
from trainer_rank.planner import PassWork, Sharing, Speed, pass_work
from trainer_rank.prefix import Layout
from trainer_rank.requests import Request
from trainer_rank.session.pricing import Forward, Pricer
from trainer_rank.session.units import PassKey, Unit, pass_key

Units = tuple[int, ...]
"""Numbers of units of a group, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """Units as one micro-batch: its passes and what they cost together.

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
    """Answers ``admission(units)`` for units of one group.

    Args:
        leaves: All requests of the call.
        units: Units in tree order.
        pricer: Prices forwards.
        layout: Layout every pass must use; None takes the fastest layout that fits.
        max_packed_rows: Hard cap on packed rows of one pass; None for no cap.
        facts: The model.
        recompute_choices: How many of the first layers may run again in backward, ascending, where that is chosen for
            each candidate; empty where it is not.

        speed: How long passes are predicted to take.

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
        speed: Speed | None = None,
    ) -> None:
        self._facts = facts
        self.speed = Speed() if speed is None else speed
        self.recompute_choices = recompute_choices
        self.most_recomputed: int | None = None
        self._leaves = leaves
        self._units = units
        self._pricer = pricer
        # Full sharing is last: it has the fewest rows of all.
        self._layouts = (None, Layout.full_sharing()) if layout is None else (layout,)
        self._max_packed_rows = max_packed_rows
        self._works: dict[tuple[Units, int], tuple[PassWork, ...]] = {}
        self._known: dict[tuple[Units, int, int | None], Candidate] = {}

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

    @property
    def everything(self) -> Units:
        """All units."""
        return tuple(range(len(self._units)))

    @property
    def sharing(self) -> Sharing:
        """How long the units are and what they share, where the layout lets them."""
        if self._layouts == (Layout.no_sharing(),):
            rows = [sum(request.num_tokens for request in self._active((unit,))) for unit in self.everything]
            return Sharing(rows, [0] * self.num_units)
        return Sharing([unit.rows for unit in self._units], [unit.shared_rows for unit in self._units])

    def computes(self, unit: int) -> bool:
        """Return whether a unit has a row to compute; the others ride along."""
        return self._units[unit].rows > 0

    def fingerprint(self, units: Units, layout: int) -> str:
        """Return the digest of the shapes of units' passes under a layout, by its number; prices nothing."""
        return _fingerprint(self._passes(units, layout))

    def indices(self, units: Units) -> tuple[int, ...]:
        """Return the flat indices of units, in reading order."""
        return tuple(sorted(index for unit in units for index in self._units[unit].indices))

    def within_cap(self, units: Units) -> bool:
        """Return whether units keep to the cap on packed rows under some layout; prices nothing."""
        return any(self._is_within_cap(units, number) for number in range(len(self._layouts)))

    def admission(
        self, units: Units, budget: Budget, pending: tuple[Term, ...], *, layout: int | None = None
    ) -> tuple[Candidate, Admission]:
        """Return units under the fastest layout that is admitted, else under the cheapest one.

        Where it is chosen how many layers are recomputed, the fewest with which a layout is admitted: recomputing all
        of them takes a third of the time again, and a layout a few rows. A layout that breaks the cap on packed rows
        is not considered, unless all do. With ``layout``, the number of one, only that one is. When a bound rules all
        of them out, only the last is worked out, for the refusal.
        """
        choice: Sequence[int] = range(len(self._layouts)) if layout is None else (layout,)
        numbers = [number for number in choice if self._is_within_cap(units, number)]
        if len(numbers) > 1 and self._ruled_out([units], budget, pending):
            numbers = numbers[-1:]
        tried = []
        for recomputed, number in itertools.product(self._recomputed(), numbers or choice[-1:]):
            candidate = self._candidate(units, number, recomputed)
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
        shares = [tuple(range(*pair)) for pair in itertools.pairwise(edges)]
        numbers = range(len(self._layouts))
        if len(numbers) > 1 and self._ruled_out(shares, budget, pending):
            numbers = numbers[-1:]
        tried = []
        for recomputed in self._recomputed():
            candidates = [self._together(shares, number, recomputed) for number in numbers]
            tried += [(candidate, admit(candidate.price, budget, pending)) for candidate in candidates]
            if any(verdict.admitted for _, verdict in tried):
                break
        return min(tried, key=lambda pair: pair[1].charged_bytes)

    def _recomputed(self) -> tuple[int | None, ...]:
        """Return the choices of how many layers are recomputed, the fastest first."""
        most = self.most_recomputed
        return tuple(one for one in self.recompute_choices if most is None or one <= most) or (None,)

    def _ruled_out(self, shares: Sequence[Units], budget: Budget, pending: tuple[Term, ...]) -> bool:
        """Return whether forwards over these units cannot fit together under any layout; packs nothing."""
        active = [self._active(units) for units in shares]
        bound = self._pricer.at_least([requests for requests in active if requests]) if any(active) else None
        return bound is not None and _exceeds(bound, budget, pending)

    def _is_within_cap(self, units: Units, number: int) -> bool:
        cap = self._max_packed_rows
        return cap is None or all(work.batch.packed_rows <= cap for work in self._passes(units, number))

    def _active(self, units: Units) -> tuple[Request, ...]:
        leaves = (self._leaves[index] for index in self.indices(units))
        return tuple(request for request in leaves if request.active)

    def _passes(self, units: Units, number: int) -> tuple[PassWork, ...]:
        """Return one pass per grad mode and adapter."""
        key = (units, number)
        if key not in self._works:
            by_key: dict[PassKey, list[int]] = {}
            for index in self.indices(units):
                if self._leaves[index].active:
                    by_key.setdefault(pass_key(self._leaves[index], self._facts), []).append(index)
            self._works[key] = tuple(
                pass_work(
                    [self._leaves[index] for index in members],
                    members,
                    self._layouts[number],
                    adapter=adapter or None,
                    segment_rows=self.speed.segment_rows,
                )
                for (_, adapter), members in sorted(by_key.items())
            )
        return self._works[key]

    def _candidate(self, units: Units, number: int, recomputed: int | None) -> Candidate:
        key = (units, number, recomputed)
        if key not in self._known:
            self._known[key] = self._together([units], number, recomputed)
        return self._known[key]

    def _together(self, shares: Sequence[Units], number: int, recomputed: int | None) -> Candidate:
        """Return one forward per share of units, alive together, as one candidate."""
        forwards = tuple(
            Forward(requests=self._active(units), works=tuple(_recomputing(work, recomputed) for work in works))
            for units in shares
            if (works := self._passes(units, number))
        )
        if forwards:
            price = self._pricer.price(forwards)
        else:
            nothing = Term(name="nothing", num_bytes=0)
            price = Price(required_bytes=0, retained_bytes=0, terms=(nothing,), phase="none")
        indices = self.indices(tuple(itertools.chain.from_iterable(shares)))
        return Candidate(indices=indices, forwards=forwards, price=price, layout=number, recomputed=recomputed)


def _exceeds(bound: LowerBound, budget: Budget, pending: tuple[Term, ...]) -> bool:
    """Return whether what is needed at least does not fit. Only a bound may rule work out, never an estimate."""
    return bound.num_bytes + sum(term.num_bytes for term in pending) > budget.available_bytes


def _recomputing(work: PassWork, recomputed: int | None) -> PassWork:
    """Return the pass with so many of its layers recomputed; one without gradients recomputes nothing."""
    return work if work.no_grad or work.recomputed == recomputed else replace(work, recomputed=recomputed)


def _fingerprint(works: Sequence[PassWork]) -> str:
    return hashlib.blake2b("".join(work.shape_key for work in works).encode(), digest_size=8).hexdigest()
