"""The layout with the least rows plus a fixed price per segment, exactly.

Replaying a segment with m consumers repeats its rows m - 1 times and saves one segment. Rows that ancestors already
replay into it (q of them) are repeated too. With c rows per segment, replaying instead of sharing therefore changes the
score by

    (m - 1) * (q + rows) - c + (the same change, summed over the children, at q + rows rather than at 0)

Three facts keep the search small, and each is checked against the exhaustive twin:

* A segment at which a request ends is shared: replaying it needs a private segment per such request, so saves none.
* The change at a segment never falls as q grows, so the last term is not negative and a replay can only pay if
  (m - 1) * (q + rows) < c. All other segments are shared outright.
* A segment shared outright isolates what is below it from what is above it.

What remains are runs of short segments. They are solved bottom-up for each q that can occur, at most min(depth, c) per
segment.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from trainer_rank.prefix.layout import Layout
from trainer_rank.prefix.tree import PrefixTree

DEFAULT_SEGMENT_COST_ROWS: Final = 16
"""A convention, not a measurement: a segment of a few rows costs about as much in kernel calls as in arithmetic."""


def choose_layout(tree: PrefixTree, segment_cost_rows: int = DEFAULT_SEGMENT_COST_ROWS) -> Layout:
    """Return the layout that minimises packed rows + ``segment_cost_rows`` * packed segments.

    Exact; at equal score a segment is shared rather than replayed, the one nearer the root first. Time is O(segments),
    plus O(segments * min(depth, ``segment_cost_rows``)) where short segments follow each other.

    Raises:
        ValueError: ``segment_cost_rows`` is negative.
    """
    if segment_cost_rows < 0:
        raise ValueError(f"segment_cost_rows must be >= 0, got {segment_cost_rows}")
    rows = tree.depth_stop - tree.depth_start
    consumers = np.bincount(tree.parent[tree.parent >= 0], minlength=tree.num_segments)
    undecided = (tree.num_ends == 0) & ((consumers - 1) * rows < segment_cost_rows)
    candidates = np.flatnonzero(undecided).tolist()
    if not candidates:
        return Layout.full_sharing()
    children: dict[int, list[int]] = {segment: [] for segment in candidates}
    for segment in candidates:
        above = int(tree.parent[segment])
        if above in children:
            children[above].append(segment)
    search = _Search(
        rows={s: int(rows[s]) for s in candidates},
        extra={s: int(consumers[s]) - 1 for s in candidates},
        children=children,
        segment_cost_rows=segment_cost_rows,
    )
    replayed = search.replayed(candidates)
    if not replayed:
        return Layout.full_sharing()
    shared = np.ones(tree.num_segments, dtype=np.bool_)
    shared[replayed] = False
    return Layout.mixed(tuple(shared.tolist()))


class _Search:
    """Bottom-up programme over the undecided segments, which come in preorder."""

    def __init__(
        self,
        *,
        rows: dict[int, int],
        extra: dict[int, int],
        children: dict[int, list[int]],
        segment_cost_rows: int,
    ) -> None:
        self._rows = rows
        self._extra = extra
        self._children = children
        self._cost = segment_cost_rows

    def replayed(self, candidates: list[int]) -> list[int]:
        """Return the segments to replay."""
        pending: dict[int, list[int]] = {segment: [0] for segment in candidates}
        for segment in candidates:
            passed_on = [q + self._rows[segment] for q in pending[segment] if self._can_pay(segment, q)]
            for child in self._children[segment]:
                pending[child] += passed_on
        # Change of score below and at a segment against sharing it all, for each number of rows replayed into it.
        change: dict[tuple[int, int], int] = {}
        replay: set[tuple[int, int]] = set()
        for segment in reversed(candidates):
            below = self._children[segment]
            when_shared = sum(change[child, 0] for child in below)
            for q in pending[segment]:
                change[segment, q] = when_shared
                if not self._can_pay(segment, q):
                    continue
                carried = q + self._rows[segment]
                when_replayed = self._extra[segment] * carried - self._cost
                when_replayed += sum(change[child, carried] for child in below)
                if when_replayed < when_shared:
                    change[segment, q] = when_replayed
                    replay.add((segment, q))
        chosen: list[int] = []
        carried_into = dict.fromkeys(candidates, 0)
        for segment in candidates:
            q = carried_into[segment]
            if (segment, q) in replay:
                chosen.append(segment)
                for child in self._children[segment]:
                    carried_into[child] = q + self._rows[segment]
        return chosen

    def _can_pay(self, segment: int, q: int) -> bool:
        return self._extra[segment] * (q + self._rows[segment]) < self._cost
