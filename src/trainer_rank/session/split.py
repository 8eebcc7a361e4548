"""How a call was split, as plain values that an identical call can be told to follow.

A split depends on memory as it was when it was made. A sum of gradients depends on the split in its last bits, so a run
that is to repeat a step exactly must cut it in the same places and share the same segments, whatever is available now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer_rank.errors import RequestError
from trainer_rank.session.candidates import Candidate, Candidates, Units


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPart:
    """One micro-batch of a call.

    Attributes:
        group: Number of its group of units, in plan order.
        units: Its units as half-open ranges, ascending; requests and units are numbered by the requests alone.
        layout: Number of the layout among those a rank tries: 0 the one it chose, 1 full sharing.
        fingerprint: Digest of the passes' shapes: rows, segments, head rows, labels.
    """

    group: int
    units: tuple[tuple[int, int], ...]
    layout: int
    fingerprint: str

    @classmethod
    def of(cls, group: int, units: Units, candidate: Candidate) -> SplitPart:
        """Return the part that ``candidate`` covers."""
        return cls(group=group, units=_ranges(units), layout=candidate.layout, fingerprint=candidate.fingerprint)

    @property
    def numbers(self) -> Units:
        """The numbers of its units."""
        return tuple(number for start, stop in self.units for number in range(start, stop))


def check_split(groups: Sequence[Candidates], split: Sequence[SplitPart]) -> None:
    """Raise ``RequestError`` unless ``split`` is part of a split of these very groups."""
    taken: dict[int, set[int]] = {}
    for position, one in enumerate(split):
        if not 0 <= one.group < len(groups):
            raise _foreign(position, f"group must be below {len(groups)}, got {one.group}")
        group = groups[one.group]
        edges = [edge for pair in one.units for edge in pair]
        if not edges or edges[0] < 0 or edges[-1] > group.num_units or sorted(set(edges)) != edges:
            raise _foreign(position, f"units must be ascending ranges in [0, {group.num_units}), got {one.units}")
        if again := taken.setdefault(one.group, set()).intersection(one.numbers):
            raise _foreign(position, f"unit {min(again)} came before")
        taken[one.group].update(one.numbers)
        if not 0 <= one.layout < group.num_layouts:
            raise _foreign(position, f"layout must be below {group.num_layouts}, got {one.layout}")
        found = group.fingerprint(one.numbers, one.layout)
        if found != one.fingerprint:
            raise _foreign(position, f"its passes had the fingerprint {one.fingerprint}, and now have {found}")


def _ranges(units: Units) -> tuple[tuple[int, int], ...]:
    """Return ascending numbers as the fewest half-open ranges."""
    starts = [unit for place, unit in enumerate(units) if not place or unit != units[place - 1] + 1]
    stops = [unit + 1 for place, unit in enumerate(units) if place + 1 == len(units) or units[place + 1] != unit + 1]
    return tuple(zip(starts, stops, strict=True))


def _foreign(position: int, reason: str) -> RequestError:
    return RequestError(
        f"split[{position}]: {reason}; a split belongs to the requests it was recorded for, so give it the same "
        "requests in the same order, or no split",
        field="split",
    )
