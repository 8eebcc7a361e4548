"""The best passes by trying every partition of the units. The twin of ``passes``, for a few units only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def naive_rows(lengths: Sequence[int], shared: Sequence[int], chosen: Sequence[int]) -> int:
    """Return the packed rows of units in ascending order: what each does not share with the one before it."""
    rows = 0
    for position, unit in enumerate(chosen):
        rows += lengths[unit]
        if position:
            rows -= min(shared[chosen[position - 1] + 1 : unit + 1])
    return rows


def naive_passes(
    lengths: Sequence[int], shared: Sequence[int], capacity: int, pass_rows: int
) -> tuple[int, list[list[int]]]:
    """Return the least rows plus ``pass_rows`` per pass, and passes with it; a unit beyond the capacity goes alone."""
    best: tuple[int, list[list[int]]] | None = None
    for passes in _partitions(list(range(len(lengths)))):
        rows = [naive_rows(lengths, shared, one) for one in passes]
        if any(size > capacity and len(one) > 1 for size, one in zip(rows, passes, strict=True)):
            continue
        score = sum(rows) + pass_rows * len(passes)
        if best is None or score < best[0]:
            best = score, passes
    assert best is not None, "every unit alone is always allowed"
    return best


def _partitions(units: list[int]) -> Iterator[list[list[int]]]:
    if not units:
        yield []
        return
    *others, last = units
    for passes in _partitions(others):
        for number in range(len(passes)):
            yield [*passes[:number], [*passes[number], last], *passes[number + 1 :]]
        yield [*passes, [last]]
