"""Hypothesis strategies shared by the property tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from trainer_rank.prefix import IntArray
from trainer_rank.prefix.naive import naive_preorder, naive_tree

Rows = list[list[int]]


def as_arrays(rows: Rows) -> list[IntArray]:
    """Return token rows as the library takes them."""
    return [np.array(row, dtype=np.int64) for row in rows]


def token_rows(*, max_rows: int = 7, max_tokens: int = 6) -> st.SearchStrategy[Rows]:
    """Rows over three tokens, so that prefixes, duplicates and requests inside the tree are common."""
    return st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=max_tokens), min_size=1, max_size=max_rows)


def wide_token_rows() -> st.SearchStrategy[Rows]:
    """Rows of token ids around the widths that sort keys are stored in."""
    edges = [0, 1, 255, 256, 2**16 - 1, 2**16, 2**31, 2**32 - 1, 2**32, 2**63 - 1]
    return st.lists(st.lists(st.sampled_from(edges), min_size=1, max_size=4), min_size=1, max_size=6)


@st.composite
def long_rows(draw: st.DrawFn) -> Rows:
    """Rows of up to some thousand tokens that part and end around the lengths of sort blocks."""
    cuts = [1, 255, 256, 257, 767, 768, 769, 1791, 1792, 1793]
    base = [7] * 2000
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        row = base[: draw(st.sampled_from(cuts))]
        if draw(st.booleans()):
            row[draw(st.sampled_from([cut for cut in cuts if cut <= len(row)])) - 1] = draw(st.integers(5, 9))
        rows.append(row)
    return rows


@st.composite
def rows_and_decisions(draw: st.DrawFn, **limits: Any) -> tuple[Rows, tuple[bool, ...]]:
    """Rows with one layout decision per segment of their tree."""
    rows = draw(token_rows(**limits))
    count = len(naive_preorder(naive_tree(rows)))
    return rows, tuple(draw(st.lists(st.booleans(), min_size=count, max_size=count)))


@st.composite
def rows_decisions_and_subset(draw: st.DrawFn) -> tuple[Rows, tuple[bool, ...], list[int]]:
    """Rows, one decision per segment, and some of the requests in any order."""
    rows, decisions = draw(rows_and_decisions())
    subset = draw(st.lists(st.integers(0, len(rows) - 1), unique=True))
    return rows, decisions, subset
