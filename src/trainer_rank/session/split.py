"""How a call was split, as plain values that an identical call can be told to follow.

A split depends on memory as it was when it was made. A sum of gradients depends on the split in its last bits, so a run
that is to repeat a step exactly must cut it in the same places and share the same segments, whatever is available now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer_rank.errors import RequestError
from trainer_rank.session.candidates import Candidate, Candidates


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRange:
    """One micro-batch of a call.

    Attributes:
        group: Number of its group of units, in plan order.
        start, stop: Range of units in that group, in tree order; requests and units are numbered by the requests alone.
        layout: Number of the layout among those a rank tries: 0 the one it chose, 1 full sharing.
        fingerprint: Digest of the passes' shapes: rows, segments, head rows, labels.
    """

    group: int
    start: int
    stop: int
    layout: int
    fingerprint: str

    @classmethod
    def of(cls, group: int, start: int, stop: int, candidate: Candidate) -> SplitRange:
        """Return the range that ``candidate`` covers."""
        return cls(group=group, start=start, stop=stop, layout=candidate.layout, fingerprint=candidate.fingerprint)


def check_split(groups: Sequence[Candidates], split: Sequence[SplitRange]) -> None:
    """Raise ``RequestError`` unless ``split`` is part of a split of these very groups."""
    taken: dict[int, list[tuple[int, int]]] = {}
    for position, one in enumerate(split):
        if not 0 <= one.group < len(groups):
            raise _foreign(position, f"group must be below {len(groups)}, got {one.group}")
        group = groups[one.group]
        if not 0 <= one.start < one.stop <= group.num_units:
            raise _foreign(position, f"it must lie in [0, {group.num_units}), got [{one.start}, {one.stop})")
        for start, stop in taken.setdefault(one.group, []):
            if one.start < stop and start < one.stop:
                raise _foreign(position, f"units [{start}, {stop}) came before, and it has [{one.start}, {one.stop})")
        taken[one.group].append((one.start, one.stop))
        if not 0 <= one.layout < group.num_layouts:
            raise _foreign(position, f"layout must be below {group.num_layouts}, got {one.layout}")
        found = group.fingerprint(one.start, one.stop, one.layout)
        if found != one.fingerprint:
            raise _foreign(position, f"its passes had the fingerprint {one.fingerprint}, and now have {found}")


def _foreign(position: int, reason: str) -> RequestError:
    return RequestError(
        f"split[{position}]: {reason}; a split belongs to the requests it was recorded for, so give it the same "
        "requests in the same order, or no split",
        field="split",
    )
