"""Requests as one packed batch: rows in depth-first preorder, with an explicit segment table.

    tree                      row      0 1 2 3 4 5 6 7      segment  start stop parent subtree_stop
    a b ─┬─ c (request 0)     token    a b c d e f d g      0 a b    0     2    -1     8
         └─ d ─┬─ e f (1)     position 0 1 2 2 3 4 2 3      1 c      2     3     0     3
               └─ g   (2)                                   2 d e f  3     6     0     6
    d is replayed                                           3 d g    6     8     0     8

A row attends to the rows of its own segment up to itself and to all rows of the segments above. Rows [stop,
subtree_stop) of a segment are exactly the rows of its descendants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer_rank.prefix.layout import Layout
from trainer_rank.prefix.order import IntArray
from trainer_rank.prefix.tree import PrefixTree


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """R requests packed into P rows and S segments. Arrays are int64 and not to be modified.

    Attributes:
        token_ids: (P,) token of each row.
        positions: (P,) position of each row within every request that runs through it.
        segment_start, segment_stop: (S,) rows of each segment, half-open, never empty, tiling [0, P) in order.
        segment_parent: (S,) parent segment, -1 for a root; always smaller than the segment's own number.
        subtree_stop: (S,) row one past the last descendant of the segment, ``segment_stop`` for a leaf.
        requests: (R,) request index in the tree of each packed request, in the caller's order.
        request_segment: (R,) segment at which each packed request ends, at its last row.
        request_length: (R,) tokens of each packed request.

    Methods take the position i of a request in ``requests``.
    """

    token_ids: IntArray
    positions: IntArray
    segment_start: IntArray
    segment_stop: IntArray
    segment_parent: IntArray
    subtree_stop: IntArray
    requests: IntArray
    request_segment: IntArray
    request_length: IntArray

    @property
    def packed_rows(self) -> int:
        """P, rows the model computes."""
        return self.token_ids.size

    @property
    def logical_tokens(self) -> int:
        """Sum of the lengths of the packed requests."""
        return int(self.request_length.sum())

    @property
    def sharing_ratio(self) -> float:
        """Logical tokens per packed row; 1.0 for an empty batch."""
        return self.logical_tokens / self.packed_rows if self.packed_rows else 1.0

    @property
    def num_segments(self) -> int:
        return self.segment_start.size

    @property
    def num_requests(self) -> int:
        return self.requests.size

    def request_path(self, i: int) -> IntArray:
        """Return the segments (D,) of packed request ``i`` from root to end."""
        path = []
        segment = int(self.request_segment[i])
        while segment >= 0:
            path.append(segment)
            segment = int(self.segment_parent[segment])
        return np.array(path[::-1], dtype=np.int64)

    def request_rows(self, i: int) -> IntArray:
        """Return the packed row (T,) of each token of packed request ``i``."""
        return np.concatenate(
            [
                np.arange(self.segment_start[segment], self.segment_stop[segment], dtype=np.int64)
                for segment in self.request_path(i).tolist()
            ]
        )

    def row_segments(self) -> IntArray:
        """Return the segment (P,) of each row."""
        return np.repeat(np.arange(self.num_segments, dtype=np.int64), self.segment_stop - self.segment_start)

    def check(self) -> None:
        """Assert every invariant stated above, in O(P + S + R * depth)."""
        start, stop, parent = self.segment_start, self.segment_stop, self.segment_parent
        edges = np.append(start, self.packed_rows)
        assert edges[0] == 0, f"first segment starts at row {edges[0]}, not 0"
        assert np.array_equal(edges[1:], stop), "segments do not tile the rows"
        assert np.all(stop > start), "a segment is empty"
        assert np.all(parent < np.arange(self.num_segments)), "a parent comes after its child"
        assert np.all(parent >= -1), "a parent is out of range"
        expected_stop = stop.copy()
        for segment in range(self.num_segments - 1, -1, -1):
            if parent[segment] >= 0:
                above = parent[segment]
                expected_stop[above] = max(expected_stop[above], expected_stop[segment])
        assert np.array_equal(self.subtree_stop, expected_stop), "subtree_stop is not the last descendant's stop"
        inside = parent >= 0
        assert np.all(self.subtree_stop[inside] <= self.subtree_stop[parent[inside]]), "subtrees are not nested"
        base = np.zeros(self.num_segments, dtype=np.int64)
        base[inside] = self.positions[stop[parent[inside]] - 1] + 1
        rows = np.arange(self.packed_rows) - np.repeat(start - base, stop - start)
        assert np.array_equal(self.positions, rows), "positions do not continue the parent segment"
        ends = self.positions[stop[self.request_segment] - 1] + 1
        assert np.array_equal(ends, self.request_length), "a request does not end at the end of its segment"


def pack(tree: PrefixTree, layout: Layout, requests: Sequence[int] | None = None) -> PackedBatch:
    """Return ``requests`` of ``tree`` (all of them by default) packed under ``layout``.

    Rows follow the canonical order of the tree whatever the order of ``requests``. The layout is resolved on the whole
    tree; segments that keep a single consumer among ``requests`` merge into it, so under full sharing a subset packs as
    a tree built from it alone. Cost is linear in packed rows and in the segments of the tree.

    Raises:
        ValueError: A request index is out of range or repeated, or ``layout`` does not fit the tree.
    """
    chosen = _request_indices(tree, requests)
    ranks = np.sort(tree.rank[chosen])
    table = _SegmentTable()
    ranked_segment = _lay_out(tree, layout, ranks, table)
    depth_start = np.array(table.depth_start, dtype=np.int64)
    sizes = np.array(table.depth_stop, dtype=np.int64) - depth_start
    stop = np.cumsum(sizes)
    start = stop - sizes
    slices = [
        tree.rows[request][first:last]
        for request, first, last in zip(table.request, table.depth_start, table.depth_stop, strict=True)
    ]
    packed_rows = int(stop[-1]) if stop.size else 0
    return PackedBatch(
        token_ids=np.concatenate(slices) if slices else np.empty(0, dtype=np.int64),
        positions=np.arange(packed_rows, dtype=np.int64) - np.repeat(start - depth_start, sizes),
        segment_start=start,
        segment_stop=stop,
        segment_parent=np.array(table.parent, dtype=np.int64),
        subtree_stop=_subtree_stops(table.parent, stop),
        requests=chosen,
        request_segment=ranked_segment[np.searchsorted(ranks, tree.rank[chosen])],
        request_length=tree.length[chosen],
    )


class _SegmentTable:
    """Packed segments as they are laid out, in depth-first preorder."""

    def __init__(self) -> None:
        self.request: list[int] = []
        self.depth_start: list[int] = []
        self.depth_stop: list[int] = []
        self.parent: list[int] = []

    def add(self, request: int, depth_start: int, depth_stop: int, parent: int) -> int:
        """Append tokens [depth_start, depth_stop) of ``request`` below ``parent``; return the new segment's number."""
        self.request.append(request)
        self.depth_start.append(depth_start)
        self.depth_stop.append(depth_stop)
        self.parent.append(parent)
        return len(self.parent) - 1


def _lay_out(tree: PrefixTree, layout: Layout, ranks: IntArray, table: _SegmentTable) -> IntArray:
    """Append the packed segments of the canonical ``ranks`` (R,) to ``table``; return the end segment of each (R,)."""
    first = np.searchsorted(ranks, tree.rank_start)
    ends = np.searchsorted(ranks, tree.rank_start + tree.num_ends)
    live = np.searchsorted(ranks, tree.rank_stop) > first
    live_parent = tree.parent[live]
    consumers = (ends - first) + np.bincount(live_parent[live_parent >= 0], minlength=tree.num_segments)
    shared = layout.shared(tree) & (consumers > 1)

    request = tree.order[ranks].tolist()
    ranked_segment = [-1] * len(request)
    # For the children of each tree segment: the packed segment they hang from, and the depth at which their own rows
    # begin (above the tree segment's own start where ancestors are replayed).
    hang_from = [-1] * tree.num_segments
    begin = [0] * tree.num_segments
    segments = np.flatnonzero(live)
    columns = (segments, live_parent, tree.depth_stop[live], shared[live], first[live], ends[live])
    for segment, above, depth_stop, share, low, high in zip(*(column.tolist() for column in columns), strict=True):
        parent = hang_from[above] if above >= 0 else -1
        depth_start = begin[above] if above >= 0 else 0
        if share:
            packed = table.add(request[low], depth_start, depth_stop, parent)
            ranked_segment[low:high] = [packed] * (high - low)
            hang_from[segment], begin[segment] = packed, depth_stop
        else:
            for k in range(low, high):
                ranked_segment[k] = table.add(request[k], depth_start, depth_stop, parent)
            hang_from[segment], begin[segment] = parent, depth_start
    return np.array(ranked_segment, dtype=np.int64)


def _request_indices(tree: PrefixTree, requests: Sequence[int] | None) -> IntArray:
    if requests is None:
        return np.arange(tree.num_requests, dtype=np.int64)
    chosen = np.array(requests, dtype=np.int64).reshape(-1)
    if chosen.size and not (chosen.min() >= 0 and chosen.max() < tree.num_requests):
        bad = next(index for index in chosen.tolist() if not 0 <= index < tree.num_requests)
        raise ValueError(f"requests must be indices in [0, {tree.num_requests}), got {bad}")
    if np.unique(chosen).size != chosen.size:
        values, counts = np.unique(chosen, return_counts=True)
        raise ValueError(f"requests must not repeat, got {int(values[counts > 1][0])} twice or more")
    return chosen


def _subtree_stops(parent: list[int], stop: IntArray) -> IntArray:
    """Return the row at which each subtree stops. Children come after their parent, the last one last."""
    stops = stop.tolist()
    for segment in range(len(parent) - 1, -1, -1):
        above = parent[segment]
        if above >= 0 and stops[above] < stops[segment]:
            stops[above] = stops[segment]
    return np.array(stops, dtype=np.int64)
