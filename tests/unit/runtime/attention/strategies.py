"""Segment tables of packed prefix forests, as the attention plan takes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

Tree = tuple[int, list[Any]]
"""A run of rows and the subtrees below it."""


class Table(NamedTuple):
    """Segments in depth-first preorder: first row, one past the last, one past the last descendant."""

    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    subtree_stop: NDArray[np.int64]


def table(*roots: Tree) -> Table:
    """Return the segment table of a forest."""
    start: list[int] = []
    stop: list[int] = []
    reach: list[int] = []

    def walk(tree: Tree, row: int) -> int:
        rows, children = tree
        number = len(start)
        start.append(row)
        row += rows
        stop.append(row)
        reach.append(0)
        for child in children:
            row = walk(child, row)
        reach[number] = row
        return row

    row = 0
    for root in roots:
        row = walk(root, row)
    return Table(*(np.array(column, dtype=np.int64) for column in (start, stop, reach)))


def leaves(*lengths: int) -> list[Tree]:
    """Return childless runs."""
    return [(length, []) for length in lengths]


def lengths() -> st.SearchStrategy[int]:
    """Mostly short runs, often one row, some around the edges of buckets."""
    return st.one_of(st.integers(1, 3), st.integers(1, 20), st.sampled_from([15, 16, 17, 24, 25, 63, 64, 65, 80]))


def trees() -> st.SearchStrategy[Tree]:
    """Trees of any form, only children included."""
    leaf = st.tuples(lengths(), st.just([]))
    return st.recursive(leaf, lambda child: st.tuples(lengths(), st.lists(child, min_size=1, max_size=4)), max_leaves=8)


def forests() -> st.SearchStrategy[list[Tree]]:
    """One to four trees that share nothing."""
    return st.lists(trees(), min_size=1, max_size=4)
