"""The radix tree against its dictionary twin."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.property.strategies import Rows, as_arrays, long_rows, token_rows, wide_token_rows
from trainer_rank.prefix import Layout, build_tree, pack, tree_fingerprint
from trainer_rank.prefix.naive import NaiveSegment, naive_preorder, naive_tree

any_rows = st.one_of(token_rows(), wide_token_rows(), long_rows())


def summary(segment: NaiveSegment) -> tuple[list[int], list[int]]:
    return segment.tokens, sorted(segment.ends)


@given(any_rows)
def test_segments_in_preorder_equal_the_dictionary_trie(rows: Rows) -> None:
    """Every segment has the tokens and the ending requests of the trie's, in the same order."""
    tree = build_tree(as_arrays(rows))
    found = [
        (tree.segment_tokens(s).tolist(), np.flatnonzero(tree.request_segment == s).tolist())
        for s in range(tree.num_segments)
    ]
    assert found == [summary(segment) for segment in naive_preorder(naive_tree(rows))]


@given(any_rows)
def test_order_sorts_rows_and_keeps_duplicates_by_index(rows: Rows) -> None:
    """Canonical order is that of the tuples, equal ones by request index."""
    tree = build_tree(as_arrays(rows))
    assert tree.order.tolist() == sorted(range(len(rows)), key=lambda index: (rows[index], index))
    assert tree.order[tree.rank].tolist() == list(range(len(rows)))


@given(any_rows)
def test_segments_below_and_ranks_through_a_segment_are_its_ranges(rows: Rows) -> None:
    """Subtree and rank ranges agree with the chain of parents."""
    tree = build_tree(as_arrays(rows))
    for s in range(tree.num_segments):
        below = [t for t in range(tree.num_segments) if s in path(tree.parent, t)]
        assert below == list(range(s, tree.subtree_stop[s]))
        through = [r for r in range(tree.num_requests) if s in path(tree.parent, int(tree.request_segment[r]))]
        assert sorted(tree.rank[through].tolist()) == list(range(tree.rank_start[s], tree.rank_stop[s]))
        assert tree.level[s] == len(path(tree.parent, s)) - 1
        assert tree.num_ends[s] == np.count_nonzero(tree.request_segment == s)


@given(token_rows())
def test_rows_of_a_rank_range_equal_packing_it_alone(rows: Rows) -> None:
    """The constant-time row count of a range is what packing that range under full sharing gives."""
    tree = build_tree(as_arrays(rows))
    for start in range(tree.num_requests + 1):
        for stop in range(start, tree.num_requests + 1):
            batch = pack(tree, Layout.full_sharing(), tree.order[start:stop].tolist())
            assert tree.packed_rows_of_range(start, stop) == batch.packed_rows


@given(token_rows(), st.randoms(use_true_random=False))
def test_fingerprint_and_packed_batch_ignore_arrival_order(rows: Rows, random: object) -> None:
    """Shuffled requests give the same tree and the same packed batch up to numbering."""
    shuffled = list(rows)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = build_tree(as_arrays(rows)), build_tree(as_arrays(shuffled))
    assert tree_fingerprint(one) == tree_fingerprint(other)
    for layout in (Layout.no_sharing(), Layout.uniform_depth(1), Layout.full_sharing()):
        a, b = pack(one, layout), pack(other, layout)
        for name in ("token_ids", "positions", "segment_start", "segment_stop", "segment_parent", "subtree_stop"):
            assert np.array_equal(getattr(a, name), getattr(b, name)), name


def path(parent: np.ndarray, segment: int) -> list[int]:
    found = []
    while segment >= 0:
        found.append(segment)
        segment = int(parent[segment])
    return found
