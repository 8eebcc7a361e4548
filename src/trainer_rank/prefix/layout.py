"""Which segments of a prefix tree are shared.

Every segment of the tree carries one decision. *Shared*: its rows are computed once, for everything below it.
*Replayed*: its rows are copied to the front of each of its consumers: its child segments and the requests ending at it.

    tree                 share all                share {A, B}, replay C           share nothing
    A ─┬─ B (ends: 0)    A | B | C | D | E        A | B | C D | C E                A B | A C D | A C E
       └─ C ─┬─ D (1)    5 segments               4 segments, C twice              3 segments, one per request
             └─ E (2)

A segment with one consumer is merged into it whatever its decision: that costs no row and saves a segment. Duplicates
that end at a shared segment share it; at a replayed one each gets its own copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from trainer_rank.prefix.tree import PrefixTree

LayoutKind: TypeAlias = Literal["none", "uniform", "full", "mixed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A choice of shared segments; hashable, and but for ``mixed`` independent of the tree it is applied to.

    Build one with :meth:`no_sharing`, :meth:`uniform_depth`, :meth:`full_sharing` or :meth:`mixed`.

    Attributes:
        kind: Which of the four.
        depth: Number of shared levels of a uniform layout, else 0.
        decisions: One decision per tree segment of a mixed layout (True: shared), else empty.
    """

    kind: LayoutKind
    depth: int = 0
    decisions: tuple[bool, ...] = ()

    @classmethod
    def no_sharing(cls) -> Self:
        """Every request alone: packed rows equal logical tokens."""
        return cls(kind="none")

    @classmethod
    def uniform_depth(cls, depth: int) -> Self:
        """Share the segments with fewer than ``depth`` ancestors, replay the rest; 0 shares nothing.

        Raises:
            ValueError: ``depth`` is negative.
        """
        if depth < 0:
            raise ValueError(f"depth must be >= 0, got {depth}")
        return cls(kind="uniform", depth=depth)

    @classmethod
    def full_sharing(cls) -> Self:
        """Share every segment: the fewest packed rows."""
        return cls(kind="full")

    @classmethod
    def mixed(cls, decisions: tuple[bool, ...]) -> Self:
        """Share exactly the tree segments whose decision is True; one decision per segment in preorder."""
        return cls(kind="mixed", decisions=tuple(bool(decision) for decision in decisions))

    def shared(self, tree: PrefixTree) -> npt.NDArray[np.bool_]:
        """Return one decision per segment of ``tree`` (S,) bool, True where the segment is shared.

        Raises:
            ValueError: A mixed layout has another number of decisions than the tree has segments.
        """
        if self.kind == "mixed":
            if len(self.decisions) != tree.num_segments:
                raise ValueError(
                    f"a mixed layout needs one decision per segment: got {len(self.decisions)}, "
                    f"the tree has {tree.num_segments}. Build the layout from the tree it is used with."
                )
            return np.array(self.decisions, dtype=np.bool_)
        if self.kind == "uniform":
            return np.asarray(tree.level < self.depth)
        return np.full(tree.num_segments, self.kind == "full")


def layout_rows(tree: PrefixTree, layout: Layout) -> int:
    """Return the packed rows of all requests of ``tree`` under ``layout``, without packing."""
    shared = layout.shared(tree).tolist()
    ends = tree.num_ends.tolist()
    parents = tree.parent.tolist()
    # Copies of a segment's rows: one when shared, else one per consumer, through replayed children.
    copies = [1 if share else count for share, count in zip(shared, ends, strict=True)]
    for segment in range(len(parents) - 1, -1, -1):
        parent = parents[segment]
        if parent >= 0 and not shared[parent]:
            copies[parent] += copies[segment]
    return int(np.dot(np.array(copies, dtype=np.int64), tree.depth_stop - tree.depth_start))
