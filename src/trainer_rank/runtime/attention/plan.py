"""Which kernel calls give the attention of a packed prefix tree. NumPy only.

Rows lie in depth-first preorder, so the descendants of the rows ``[start, stop)`` are exactly the rows
``[stop, reach)``, and two kinds of call cover everything::

    prompt  a a a                 block(prompt): queries a..c on keys a, causal at the top left:
    leaf 1  a a a b b                            rows of b and c see all of a
    leaf 2  a a a . . c c         bucket:        b on b and c on c, causal, as one batched call

A request that ends inside the tree cuts a segment without branching off. Such a chain of only children lies in
consecutive rows and is, for attention, one run; chains are joined first. A multi-turn conversation with one request
per turn is therefore a single causal call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]

# Leaves up to this length are gathered into padded batches; longer ones amortise a call of their own and are
# sliced without a copy.
LONGEST_GATHERED_LEAF = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Queries ``[start, reach)`` on keys ``[start, stop)``, causal inside ``[start, stop)``, unmasked after it.

    ``first`` tells that no earlier call has written these rows (the block belongs to a root).
    """

    start: int
    stop: int
    reach: int
    first: bool

    @property
    def kind(self) -> str:
        """Which code runs it: ``first`` or ``merge``."""
        return "first" if self.first else "merge"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Leaf runs attended in one batched causal call.

    Attributes:
        count: Number of runs B.
        length: Common (padded) length T.
        start: First row when the runs are consecutive and unpadded, so that a view serves; else None.
        rows: (B, T) row of each slot when a gather is needed; padding repeats the run's last row. None for views.
        lengths: (B,) real lengths when some run is padded; None otherwise.
        first: No earlier call has written these rows (the runs are roots).
    """

    count: int
    length: int
    start: int | None
    rows: Rows | None
    lengths: Rows | None
    first: bool

    @property
    def kind(self) -> str:
        """Which code runs it: ``view``, ``gathered`` or ``padded``, with ``-first`` for roots."""
        kind = "view" if self.rows is None else "gathered" if self.lengths is None else "padded"
        return f"{kind}-first" if self.first else kind


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """The calls of one attention layer over P rows; ``blocks`` in preorder before ``buckets``."""

    num_rows: int
    blocks: tuple[Block, ...]
    buckets: tuple[Bucket, ...]


def attention_plan(start: Rows, stop: Rows, subtree_stop: Rows) -> AttentionPlan:
    """Return the kernel calls for a segment table in depth-first preorder.

    Args:
        start: (S,) first row of each segment; segments tile the rows ``[0, P)`` in order.
        stop: (S,) one past its last row.
        subtree_stop: (S,) one past its last descendant row.
    """
    covered = 0
    blocks: list[Block] = []
    roots: list[tuple[int, int]] = []
    leaves: list[tuple[int, int]] = []
    for run_start, run_stop, reach in _join_chains(start, stop, subtree_stop):
        first = run_start >= covered
        covered = max(covered, reach)
        if reach > run_stop:
            blocks.append(Block(start=run_start, stop=run_stop, reach=reach, first=first))
        else:
            (roots if first else leaves).append((run_start, run_stop))
    num_rows = int(stop[-1]) if len(stop) else 0
    buckets = (*_bucket(roots, first=True), *_bucket(leaves, first=False))
    return AttentionPlan(num_rows=num_rows, blocks=tuple(blocks), buckets=buckets)


def _join_chains(start: Rows, stop: Rows, subtree_stop: Rows) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, reach) of maximal runs in which every segment but the last has one child."""
    index, count = 0, len(start)
    starts, stops, reaches = start.tolist(), stop.tolist(), subtree_stop.tolist()
    while index < count:
        run_start = starts[index]
        # The next segment is the first child; it is the only one exactly when it reaches as far as its parent.
        while reaches[index] > stops[index] and reaches[index + 1] == reaches[index]:
            index += 1
        yield run_start, stops[index], reaches[index]
        index += 1


def _padded_length(length: int) -> int:
    """Return the bucket length of a leaf: exact up to 16, then multiples of 8, so that few buckets serve all."""
    return length if length <= 16 else -(-length // 8) * 8


def _bucket(leaves: list[tuple[int, int]], *, first: bool) -> Iterator[Bucket]:
    """Yield buckets: consecutive equal-length leaves as views, other short ones gathered, other long ones alone."""
    gathered: dict[int, list[tuple[int, int]]] = {}
    position = 0
    while position < len(leaves):
        begin, end = leaves[position]
        length = end - begin
        following = position + 1
        while (
            following < len(leaves)
            and leaves[following][0] == leaves[following - 1][1]
            and leaves[following][1] - leaves[following][0] == length
        ):
            following += 1
        count = following - position
        if length > LONGEST_GATHERED_LEAF or count * length > 4 * LONGEST_GATHERED_LEAF:
            yield Bucket(count=count, length=length, start=begin, rows=None, lengths=None, first=first)
        else:
            gathered.setdefault(_padded_length(length), []).extend(leaves[position:following])
        position = following
    for length, group in sorted(gathered.items()):
        begins = np.array([begin for begin, _ in group], dtype=np.int64)
        lengths = np.array([end - begin for begin, end in group], dtype=np.int64)
        offsets = np.minimum(np.arange(length, dtype=np.int64)[None, :], lengths[:, None] - 1)
        padded = bool((lengths != length).any())
        yield Bucket(
            count=len(group),
            length=length,
            start=None,
            rows=begins[:, None] + offsets,
            lengths=lengths if padded else None,
            first=first,
        )
