"""The radix tree on hand-made cases."""

from __future__ import annotations

import numpy as np
import pytest

from trainer_rank.prefix import PrefixTree, build_tree


def tree_of(*words: str) -> PrefixTree:
    """Return the tree of words, one token per letter."""
    return build_tree([np.array([ord(letter) for letter in word], dtype=np.int64) for word in words])


def spelled(tree: PrefixTree) -> list[str]:
    return ["".join(map(chr, tree.segment_tokens(s).tolist())) for s in range(tree.num_segments)]


def test_the_drawing_in_the_module_docstring_holds() -> None:
    """abcd, abce and ab give the four segments drawn."""
    tree = tree_of("abcd", "abce", "ab")
    assert spelled(tree) == ["ab", "c", "d", "e"]
    assert tree.parent.tolist() == [-1, 0, 1, 1]
    assert tree.depth_start.tolist() == [0, 2, 3, 3]
    assert tree.depth_stop.tolist() == [2, 3, 4, 4]
    assert tree.request_segment.tolist() == [2, 3, 0]
    assert tree.subtree_stop.tolist() == [4, 4, 3, 4]


def test_exact_duplicates_end_at_one_segment() -> None:
    """Duplicates share everything."""
    tree = tree_of("ab", "ab", "ab")
    assert spelled(tree) == ["ab"]
    assert tree.request_segment.tolist() == [0, 0, 0]
    assert tree.num_ends.tolist() == [3]


def test_rows_without_a_common_first_token_give_several_roots() -> None:
    """A forest is fine."""
    tree = tree_of("ax", "b", "ay")
    assert spelled(tree) == ["a", "x", "y", "b"]
    assert tree.parent.tolist() == [-1, 0, 0, -1]


def test_one_token_requests_are_segments_of_one_token() -> None:
    """The shortest request works."""
    tree = tree_of("a", "ab")
    assert spelled(tree) == ["a", "b"]
    assert tree.request_segment.tolist() == [0, 1]


def test_no_rows_give_no_segments() -> None:
    """An empty list of requests is fine."""
    tree = build_tree([])
    assert (tree.num_requests, tree.num_segments, tree.logical_tokens) == (0, 0, 0)
    assert tree.packed_rows_of_range(0, 0) == 0


def test_a_chain_of_many_thousand_segments_needs_no_recursion() -> None:
    """Depth is not limited by the interpreter's stack."""
    row = np.arange(5000, dtype=np.int64)
    tree = build_tree([row[:length] for length in range(5000, 0, -1)])
    assert tree.num_segments == 5000
    assert tree.level[-1] == 4999


def test_the_representative_runs_through_its_segment() -> None:
    """A segment's tokens are those of its representative."""
    tree = tree_of("abd", "abc")
    assert tree.representative.tolist() == [1, 1, 0]


def test_arrays_cannot_be_written() -> None:
    """A tree is a value."""
    tree = tree_of("ab")
    with pytest.raises(ValueError, match="read-only"):
        tree.parent[0] = 3


def test_a_rank_range_outside_the_tree_is_an_error() -> None:
    """The error names the range and the limit."""
    with pytest.raises(ValueError, match=r"\[0, 3\) must lie within \[0, 2\)"):
        tree_of("a", "b").packed_rows_of_range(0, 3)
