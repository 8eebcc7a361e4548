"""The kernel calls of tree attention."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from tests.unit.runtime.attention.strategies import Tree, forests, leaves, table
from trainer_rank.runtime.attention import AttentionPlan, Block, attention_plan, dense_mask
from trainer_rank.runtime.attention.plan import LONGEST_GATHERED_LEAF


def calls(plan: AttentionPlan) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (query rows, key rows) of each causal run and each block's unmasked part."""
    found = []
    for block in plan.blocks:
        keys = np.arange(block.start, block.stop)
        found += [(keys, keys), (np.arange(block.stop, block.reach), keys)]
    for bucket in plan.buckets:
        if bucket.rows is None:
            assert bucket.start is not None
            rows = np.arange(bucket.start, bucket.start + bucket.count * bucket.length).reshape(bucket.count, -1)
        else:
            rows = bucket.rows
        sizes = [bucket.length] * bucket.count if bucket.lengths is None else bucket.lengths.tolist()
        found += [(run[:size], run[:size]) for run, size in zip(rows, sizes, strict=True)]
    return found


@given(forest=forests())
def test_each_pair_of_rows_on_a_path_is_met_exactly_once(forest: list[Tree]) -> None:
    """The calls together are the dense mask, and no pair is counted twice."""
    segments = table(*forest)
    plan = attention_plan(*segments)
    met = np.zeros((plan.num_rows, plan.num_rows), dtype=int)
    for queries, keys in calls(plan):
        causal = queries[:, None] >= keys[None, :]
        met[np.ix_(queries, keys)] += causal
    np.testing.assert_array_equal(met, dense_mask(*segments).numpy().astype(int))


@given(forest=forests())
def test_the_first_call_on_a_row_says_so(forest: list[Tree]) -> None:
    """In order of execution exactly the first call that writes a row is marked first."""
    plan = attention_plan(*table(*forest))
    written = np.zeros(plan.num_rows, dtype=bool)
    for block in plan.blocks:
        rows = slice(block.start, block.reach)
        assert np.all(written[rows] != block.first)
        written[rows] = True
    for bucket in plan.buckets:
        single = AttentionPlan(num_rows=plan.num_rows, blocks=(), buckets=(bucket,))
        for rows, _ in calls(single):
            assert np.all(written[rows] != bucket.first)
            written[rows] = True
    assert written.all()


def test_a_conversation_is_one_causal_call() -> None:
    """A chain of only children is a single run, whatever its cuts."""
    plan = attention_plan(*table((5, [(1, [(7, [(2, [])])])])))
    assert plan.blocks == ()
    assert [(bucket.start, bucket.count, bucket.length) for bucket in plan.buckets if bucket.start is not None] + [
        (int(bucket.rows[0, 0]), bucket.count, bucket.length) for bucket in plan.buckets if bucket.rows is not None
    ] == [(0, 1, 15)]


def test_a_prompt_is_one_block_over_all_completions() -> None:
    """One call on the prompt's keys serves the prompt and every row below it."""
    plan = attention_plan(*table((10, leaves(3, 3, 4))))
    assert plan.blocks == (Block(start=0, stop=10, reach=20, first=True),)


def test_ragged_short_leaves_share_padded_buckets() -> None:
    """Leaves of 17 to 24 rows make one bucket of 24; the lengths say what is real."""
    (bucket,) = attention_plan(*table((4, leaves(17, 20, 24)))).buckets
    assert (bucket.count, bucket.length) == (3, 24)
    assert bucket.lengths is not None
    assert bucket.lengths.tolist() == [17, 20, 24]
    assert bucket.rows is not None
    # Padding repeats the run's own last row, so it never reads another branch.
    assert bucket.rows[0].tolist() == [*range(4, 21), *[20] * 7]


def test_leaves_up_to_sixteen_rows_are_never_padded() -> None:
    """Short leaves have a bucket per exact length."""
    plan = attention_plan(*table((4, leaves(*range(1, 17)))))
    assert sorted(bucket.length for bucket in plan.buckets) == list(range(1, 17))
    assert all(bucket.lengths is None for bucket in plan.buckets)


def test_a_thousand_ragged_leaves_make_few_calls() -> None:
    """The number of buckets does not grow with the number of leaves."""
    draw = np.random.default_rng(0)
    plan = attention_plan(*table((4, leaves(*draw.integers(1, LONGEST_GATHERED_LEAF + 1, 1000).tolist()))))
    assert len(plan.buckets) <= 16 + 6


@pytest.mark.parametrize("length", [LONGEST_GATHERED_LEAF + 1, 300])
def test_a_long_leaf_is_sliced_without_a_copy(length: int) -> None:
    """Beyond the longest gathered leaf a run has a call of its own on a view."""
    plan = attention_plan(*table((4, leaves(length, 3))))
    assert (4, 1, length) in [(bucket.start, bucket.count, bucket.length) for bucket in plan.buckets]


def test_many_equal_neighbours_are_one_view() -> None:
    """Consecutive leaves of one length need no gather."""
    (bucket,) = attention_plan(*table((4, leaves(*[40] * 32)))).buckets
    assert (bucket.start, bucket.count, bucket.length, bucket.rows) == (4, 32, 40, None)


def test_no_segments_make_no_calls() -> None:
    """An empty batch has an empty plan."""
    empty = np.empty(0, dtype=np.int64)
    plan = attention_plan(empty, empty, empty)
    assert (plan.num_rows, plan.blocks, plan.buckets) == (0, (), ())
