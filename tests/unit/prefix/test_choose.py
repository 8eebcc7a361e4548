"""Layout choice on hand-made cases."""

from __future__ import annotations

import numpy as np
import pytest

from trainer_rank.prefix import Layout, build_tree, choose_layout


def rows(prefix: int, branches: int) -> list[np.ndarray]:
    """Return ``branches`` rows of a common prefix and one token of their own."""
    return [np.append(np.arange(prefix), 10**6 + branch) for branch in range(branches)]


def test_a_long_prefix_is_shared() -> None:
    """Repeating many rows costs more than a segment."""
    assert choose_layout(build_tree(rows(100, 2)), 16) == Layout.full_sharing()


def test_a_short_prefix_is_replayed() -> None:
    """Repeating a row or two costs less than a segment."""
    assert choose_layout(build_tree(rows(2, 2)), 16) == Layout.mixed((False, True, True))


def test_a_tie_is_shared() -> None:
    """At equal score the layout with fewer rows wins."""
    assert choose_layout(build_tree(rows(16, 2)), 16) == Layout.full_sharing()


@pytest.mark.parametrize("upper", [10, 11])
def test_of_two_short_segments_in_a_row_only_the_better_one_is_replayed(upper: int) -> None:
    """Rows carried past a replayed segment count at the next one; at equal score the one nearer the root is shared."""
    a, b = np.arange(upper), np.arange(20, 30)
    tree = build_tree([np.append(a, 99), np.concatenate([a, b, [1]]), np.concatenate([a, b, [2]])])
    # Replaying the lower one saves 12 - 10, the upper one 12 - upper; both together repeat the upper twice and lose.
    assert choose_layout(tree, 12) == Layout.mixed((True, False, True, True, True))


def test_free_segments_share_everything() -> None:
    """Without a price per segment sharing never loses."""
    assert choose_layout(build_tree(rows(1, 2)), 0) == Layout.full_sharing()


def test_an_empty_tree_has_a_layout() -> None:
    """No segments, no decisions."""
    assert choose_layout(build_tree([])) == Layout.full_sharing()


def test_a_negative_price_is_an_error() -> None:
    """The error names the field, the rule and the value."""
    with pytest.raises(ValueError, match="segment_cost_rows must be >= 0, got -3"):
        choose_layout(build_tree(rows(1, 2)), -3)


def test_a_deep_comb_of_short_segments_is_solved_without_recursion() -> None:
    """Thousands of one-token segments that could all be replayed are fine."""
    row = np.zeros(3000, dtype=np.int64)
    comb = [np.append(row[:length], 1) for length in range(1, 3000)]
    assert choose_layout(build_tree(comb), 16).kind == "mixed"
