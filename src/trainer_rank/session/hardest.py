"""Which requests can be the hardest of a data set when each runs alone: few of them need a price."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from trainer_rank.requests import Flat, Request
from trainer_rank.session.candidates import Candidates
from trainer_rank.session.units import Unit, plan_order


def hardest_units(
    flat: Flat, candidates: Callable[[Flat, Sequence[Unit]], Candidates]
) -> Iterator[tuple[Candidates, list[int]]]:
    """Yield each group of units with the numbers of those that no other reaches in everything a price grows with.

    A request alone is one run of the tree: its rows are its tokens, and its price grows with tokens, scored positions,
    labels and outputs and with nothing else. An atomic group may share inside, so every one of them is yielded.
    """
    for units in plan_order(flat):
        kept: list[tuple[int, ...]] = []
        numbers = [number for number, unit in enumerate(units) if len(unit.indices) > 1]
        alone = [(sizes(flat.leaves[unit.indices[0]]), number) for number, unit in enumerate(units)
                 if len(unit.indices) == 1 and flat.leaves[unit.indices[0]].num_trained]  # fmt: skip
        for found, number in sorted(alone, reverse=True):
            if not any(all(a >= b for a, b in zip(other, found, strict=True)) for other in kept):
                kept.append(found)
                numbers.append(number)
        yield candidates(flat, units), numbers


def sizes(request: Request) -> tuple[int, ...]:
    """Return what the price of a request alone grows with."""
    labels = request.labels
    assert labels is not None, "an inactive request computes nothing"
    scored = labels >= 0
    rows = int((scored.any(axis=1) if labels.ndim > 1 else scored).sum())
    return request.num_tokens, rows, request.num_trained, int(labels.size)
