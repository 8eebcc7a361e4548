"""Packing and layout choice against their naive twins."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.property.strategies import Rows, as_arrays, rows_and_decisions, rows_decisions_and_subset, token_rows
from trainer_rank.prefix import (
    Layout,
    PackedBatch,
    batch_fingerprint,
    build_tree,
    choose_layout,
    layout_rows,
    pack,
    shape_fingerprint,
)
from trainer_rank.prefix.naive import naive_choose_score, naive_pack


def assert_equals_naive(batch: PackedBatch, rows: Rows, decisions: tuple[bool, ...], requests: list[int]) -> None:
    expected = naive_pack(rows, decisions, requests)
    assert batch.token_ids.tolist() == expected.token_ids
    assert batch.positions.tolist() == expected.positions
    columns = (batch.segment_start, batch.segment_stop, batch.segment_parent, batch.subtree_stop)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected.segments
    found = {request: batch.request_rows(i).tolist() for i, request in enumerate(requests)}
    assert found == expected.request_rows


@given(rows_decisions_and_subset())
def test_any_subset_under_any_layout_equals_the_naive_packing(case: tuple[Rows, tuple[bool, ...], list[int]]) -> None:
    """Rows, positions, segments and request rows are those of the literal definition."""
    rows, decisions, subset = case
    batch = pack(build_tree(as_arrays(rows)), Layout.mixed(decisions), subset)
    batch.check()
    assert_equals_naive(batch, rows, decisions, subset)


def test_every_layout_of_every_small_tree_equals_the_naive_packing() -> None:
    """All multisets of three rows of up to three binary tokens, under every layout."""
    choices = [list(row) for length in (1, 2, 3) for row in itertools.product((0, 1), repeat=length)]
    for rows in itertools.combinations_with_replacement(choices, 3):
        tree = build_tree(as_arrays(list(rows)))
        for decisions in itertools.product((True, False), repeat=tree.num_segments):
            batch = pack(tree, Layout.mixed(decisions))
            batch.check()
            assert_equals_naive(batch, list(rows), decisions, [0, 1, 2])


@given(rows_and_decisions())
def test_request_rows_gather_the_requests_own_tokens(case: tuple[Rows, tuple[bool, ...]]) -> None:
    """Along its rows a request reads its own tokens at positions 0, 1, 2, ..."""
    rows, decisions = case
    batch = pack(build_tree(as_arrays(rows)), Layout.mixed(decisions))
    for i, row in enumerate(rows):
        where = batch.request_rows(i)
        assert batch.token_ids[where].tolist() == row
        assert batch.positions[where].tolist() == list(range(len(row)))


@given(rows_and_decisions())
def test_rows_after_a_segment_are_its_descendants(case: tuple[Rows, tuple[bool, ...]]) -> None:
    """Rows [stop, subtree_stop) are exactly those whose segment has this one above it."""
    batch = pack(build_tree(as_arrays(case[0])), Layout.mixed(case[1]))
    of_row = batch.row_segments().tolist()
    for segment in range(batch.num_segments):
        below = []
        for row, own in enumerate(of_row):
            above = int(batch.segment_parent[own])
            while above not in (-1, segment):
                above = int(batch.segment_parent[above])
            if above == segment:
                below.append(row)
        assert below == list(range(batch.segment_stop[segment], batch.subtree_stop[segment]))


@given(rows_and_decisions())
def test_layout_rows_counts_without_packing(case: tuple[Rows, tuple[bool, ...]]) -> None:
    """The row count of a layout is that of its packed batch, between full sharing and no sharing."""
    tree = build_tree(as_arrays(case[0]))
    layout = Layout.mixed(case[1])
    count = layout_rows(tree, layout)
    assert count == pack(tree, layout).packed_rows
    assert layout_rows(tree, Layout.full_sharing()) <= count <= layout_rows(tree, Layout.no_sharing())
    assert layout_rows(tree, Layout.no_sharing()) == tree.logical_tokens


@given(token_rows(), st.data())
def test_a_fully_shared_subset_packs_as_its_own_tree(rows: Rows, data: st.DataObject) -> None:
    """Under full sharing a subset leaves no trace of the requests left out."""
    subset = data.draw(st.lists(st.integers(0, len(rows) - 1), unique=True))
    of_all = pack(build_tree(as_arrays(rows)), Layout.full_sharing(), subset)
    alone = pack(build_tree(as_arrays([rows[i] for i in subset])), Layout.full_sharing())
    assert batch_fingerprint(of_all) == batch_fingerprint(alone)
    assert np.array_equal(of_all.request_segment, alone.request_segment)


@given(token_rows(max_rows=6, max_tokens=5), st.integers(0, 20))
def test_chosen_layout_has_the_best_score_of_all(rows: Rows, segment_cost_rows: int) -> None:
    """The programme's score is the least over every layout, tried one by one."""
    tree = build_tree(as_arrays(rows))
    batch = pack(tree, choose_layout(tree, segment_cost_rows))
    score = batch.packed_rows + segment_cost_rows * batch.num_segments
    assert score == naive_choose_score(rows, segment_cost_rows)


@given(rows_and_decisions(), st.integers(1, 5))
def test_shape_fingerprint_ignores_tokens(case: tuple[Rows, tuple[bool, ...]], shift: int) -> None:
    """Other tokens in the same places give another batch of the same shape."""
    rows, decisions = case
    layout = Layout.mixed(decisions)
    one = pack(build_tree(as_arrays(rows)), layout)
    other = pack(build_tree([row + shift for row in as_arrays(rows)]), layout)
    assert shape_fingerprint(one) == shape_fingerprint(other)
    assert batch_fingerprint(one) != batch_fingerprint(other)
