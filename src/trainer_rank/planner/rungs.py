"""Choices in order of preference, of which the first that fits is taken; those that cannot fit are not worked out.

Working a choice out (packing, pricing) costs far more than a bound on what it needs. Only a ``LowerBound`` may rule one
out: an estimate that is above the truth would discard work that fits, and nobody would ever see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from trainer_rank.memory.bounds import LowerBound

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rung(Generic[T]):
    """One choice.

    Attributes:
        at_least: What it needs at least.
        make: Works it out.
    """

    at_least: LowerBound
    make: Callable[[], T]


def first_that_fits(rungs: Iterable[Rung[T]], budget_bytes: int, needs: Callable[[T], int]) -> T | None:
    """Return the first choice that needs no more than the budget, None when none does.

    Args:
        rungs: The choices, the best first.
        budget_bytes: What there is.
        needs: Exact bytes of a choice that was worked out.
    """
    for rung in rungs:
        if rung.at_least.num_bytes > budget_bytes:
            continue
        made = rung.make()
        if needs(made) <= budget_bytes:
            return made
    return None


def first_that_fits_naive(rungs: Iterable[Rung[T]], budget_bytes: int, needs: Callable[[T], int]) -> T | None:
    """Return the same by working out every choice in turn."""
    return next((made for made in (rung.make() for rung in rungs) if needs(made) <= budget_bytes), None)
