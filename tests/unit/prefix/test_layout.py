"""Layouts on the tree drawn in the module docstring."""

from __future__ import annotations

import numpy as np
import pytest

from trainer_rank.prefix import Layout, PrefixTree, build_tree, layout_rows, pack


@pytest.fixture
def tree() -> PrefixTree:
    """A over B and C, C over D and E; segments of 10, 1, 20, 2 and 3 tokens."""
    a, b, c, d, e = np.split(np.arange(36), [10, 11, 31, 33])
    return build_tree([np.concatenate([a, b]), np.concatenate([a, c, d]), np.concatenate([a, c, e])])


@pytest.mark.parametrize(
    ("layout", "segments", "rows"),
    [
        (Layout.full_sharing(), 5, 36),
        (Layout.mixed((True, True, False, True, True)), 4, 56),
        (Layout.uniform_depth(1), 4, 56),
        (Layout.no_sharing(), 3, 76),
        (Layout.uniform_depth(0), 3, 76),
        (Layout.uniform_depth(2), 5, 36),
        (Layout.uniform_depth(9), 5, 36),
    ],
)
def test_rows_and_segments_of_the_drawn_layouts(tree: PrefixTree, layout: Layout, segments: int, rows: int) -> None:
    """Each layout packs as drawn."""
    batch = pack(tree, layout)
    assert (batch.num_segments, batch.packed_rows) == (segments, rows)
    assert layout_rows(tree, layout) == rows


def test_duplicates_are_copied_when_nothing_is_shared() -> None:
    """Without sharing each duplicate has a segment of its own."""
    row = np.arange(4, dtype=np.int64)
    tree = build_tree([row, row])
    assert pack(tree, Layout.no_sharing()).num_segments == 2
    assert pack(tree, Layout.full_sharing()).num_segments == 1


def test_layouts_are_values() -> None:
    """Equal layouts are equal keys."""
    assert len({Layout.uniform_depth(1), Layout.uniform_depth(1), Layout.full_sharing()}) == 2


def test_a_negative_depth_is_an_error() -> None:
    """The error names the field, the rule and the value."""
    with pytest.raises(ValueError, match="depth must be >= 0, got -1"):
        Layout.uniform_depth(-1)


def test_a_mixed_layout_of_another_tree_is_an_error(tree: PrefixTree) -> None:
    """The number of decisions must be that of segments."""
    with pytest.raises(ValueError, match="got 1, the tree has 5"):
        layout_rows(tree, Layout.mixed((True,)))
