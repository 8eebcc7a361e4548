"""Canonical radix tree of token rows.

    request 0: a b c d        segments in depth-first preorder     depth
    request 1: a b c e        0  a b        parent -1              [0, 2)
    request 2: a b            1    c        parent  0              [2, 3)
                              2      d      parent  1              [3, 4)   request 0 ends here
    (request 2 ends at 0)     3      e      parent  1              [3, 4)   request 1 ends here

A segment is a run of tokens between two places where requests part or end. A request always ends at the end of a
segment; exact duplicates end at the same one. Rows without a common first token give several roots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer_rank.prefix.order import IntArray, canonical_order


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixTree:
    """Radix tree of N requests in S segments. Arrays are int64 and read-only.

    Attributes:
        rows: The token rows, by request index, as given (not copied).
        order: (N,) request index at each canonical rank.
        rank: (N,) canonical rank of each request.
        length: (N,) tokens of each request.
        lcp: (N,) leading tokens common to ranks k - 1 and k; ``lcp[0]`` is 0.
        rows_before: (N + 1,) packed rows of the first k ranks under full sharing.
        depth_start, depth_stop: (S,) token depth of each segment, half-open.
        parent: (S,) parent segment, -1 for a root.
        level: (S,) number of ancestors.
        subtree_stop: (S,) one past the last segment of the subtree; segments [s, subtree_stop[s]) are s and all below.
        rank_start, rank_stop: (S,) the requests that run through segment s are exactly the ranks in this range.
        num_ends: (S,) requests that end at segment s: the first ``num_ends`` ranks of its range.
        request_segment: (N,) segment at which each request ends.
    """

    rows: tuple[IntArray, ...]
    order: IntArray
    rank: IntArray
    length: IntArray
    lcp: IntArray
    rows_before: IntArray
    depth_start: IntArray
    depth_stop: IntArray
    parent: IntArray
    level: IntArray
    subtree_stop: IntArray
    rank_start: IntArray
    rank_stop: IntArray
    num_ends: IntArray
    request_segment: IntArray

    @property
    def num_requests(self) -> int:
        return self.order.size

    @property
    def num_segments(self) -> int:
        return self.parent.size

    @property
    def logical_tokens(self) -> int:
        """Sum of the request lengths."""
        return int(self.length.sum())

    @property
    def representative(self) -> IntArray:
        """(S,) a request whose tokens ``[depth_start, depth_stop)`` fill the segment: the first in canonical order."""
        return self.order[self.rank_start]

    def segment_tokens(self, segment: int) -> IntArray:
        """Return the tokens of ``segment`` (T,), a view of its representative's row."""
        row = self.rows[int(self.order[self.rank_start[segment]])]
        return row[int(self.depth_start[segment]) : int(self.depth_stop[segment])]

    def packed_rows_of_range(self, start: int, stop: int) -> int:
        """Return the packed rows of canonical ranks [start, stop) alone under full sharing, in constant time.

        Each rank adds what it does not share with the rank before it; the first one adds all of itself.
        """
        if not 0 <= start <= stop <= self.num_requests:
            raise ValueError(f"rank range [{start}, {stop}) must lie within [0, {self.num_requests})")
        if start == stop:
            return 0
        return int(self.rows_before[stop] - self.rows_before[start] + self.lcp[start])


def build_tree(rows: Sequence[IntArray]) -> PrefixTree:
    """Return the canonical radix tree of ``rows``: int64 arrays (T,) of non-negative token ids, T >= 1.

    Segments and ranks do not depend on the order of ``rows``. Linear in tokens and requests after the sort; nothing is
    recursive, so depth is limited by memory only. No rows give a tree without segments.

    Raises:
        RequestError: A row is empty, not one-dimensional, not int64, or holds a negative token id.
    """
    rows = tuple(rows)
    canonical = canonical_order(rows)
    order, length, lcp = canonical.order, canonical.length, canonical.lcp
    ranked_length = length[order]
    depth_stop, rank_start, rank_stop = _branch_points(ranked_length, lcp)
    # Segments that start at the same rank lie on one path, the shallower first.
    preorder = np.lexsort((depth_stop, rank_start))
    depth_stop, rank_start, rank_stop = depth_stop[preorder], rank_start[preorder], rank_stop[preorder]
    subtree_stop = np.searchsorted(rank_start, rank_stop, side="left")
    parent, level = _parents(subtree_stop)
    depth_start = np.where(parent >= 0, depth_stop[parent], 0) if parent.size else parent
    # The deepest segment that starts at or before a rank is where it ends: a duplicate starts none of its own.
    ranked_segment = np.searchsorted(rank_start, np.arange(order.size), side="right") - 1
    rank = np.empty_like(order)
    rank[order] = np.arange(order.size)
    tree = PrefixTree(
        rows=rows,
        order=order,
        rank=rank,
        length=length,
        lcp=lcp,
        rows_before=np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(ranked_length - lcp)]),
        depth_start=depth_start,
        depth_stop=depth_stop,
        parent=parent,
        level=level,
        subtree_stop=subtree_stop,
        rank_start=rank_start,
        rank_stop=rank_stop,
        num_ends=np.bincount(ranked_segment, minlength=parent.size),
        request_segment=ranked_segment[rank],
    )
    _make_read_only(tree)
    return tree


def _branch_points(ranked_length: IntArray, lcp: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Return depth_stop, rank_start and rank_stop of every segment, in the order in which the segments close.

    One pass over the ranks with a stack of the segments still open on the current path, as for LCP intervals of a
    suffix array. A segment closes at the first rank that parts from it.
    """
    closed: list[tuple[int, int, int]] = []
    open_depth: list[int] = []
    open_rank: list[int] = []
    for rank, (stop, shared) in enumerate(zip(ranked_length.tolist(), lcp.tolist(), strict=True)):
        first = rank
        while open_depth and open_depth[-1] > shared:
            first = open_rank.pop()
            closed.append((open_depth.pop(), first, rank))
        deepest = open_depth[-1] if open_depth else 0
        if deepest < shared:
            # The path parts inside a segment: its upper half stays open and began where the lower half did.
            open_depth.append(shared)
            open_rank.append(first)
        if stop > shared:
            open_depth.append(stop)
            open_rank.append(rank)
    while open_depth:
        closed.append((open_depth.pop(), open_rank.pop(), ranked_length.size))
    table = np.array(closed, dtype=np.int64).reshape(-1, 3)
    return table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy()


def _parents(subtree_stop: IntArray) -> tuple[IntArray, IntArray]:
    """Return parent and level of each segment from the ends of the subtrees in preorder."""
    parent: list[int] = []
    level: list[int] = []
    path: list[int] = []
    stops = subtree_stop.tolist()
    for segment in range(len(stops)):
        while path and stops[path[-1]] <= segment:
            path.pop()
        parent.append(path[-1] if path else -1)
        level.append(len(path))
        path.append(segment)
    return np.array(parent, dtype=np.int64), np.array(level, dtype=np.int64)


def _make_read_only(tree: PrefixTree) -> None:
    for name in PrefixTree.__slots__:
        value = getattr(tree, name)
        if isinstance(value, np.ndarray):
            value.setflags(write=False)
