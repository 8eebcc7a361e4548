"""Plans of passes against their exhaustive twin, over random trees."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_rank.planner.bins import fill_bins
from trainer_rank.planner.exact_passes import exact_passes
from trainer_rank.planner.naive_passes import naive_passes, naive_rows
from trainer_rank.planner.passes import PassPlan, cut_in_order, plan_passes
from trainer_rank.planner.sharing import Sharing
from trainer_rank.prefix import Layout, build_tree, layout_rows

rows_of_tokens = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=6)
many_rows = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=24), min_size=10, max_size=60)


def units_of(rows: list[list[int]]) -> Sharing:
    """Return one unit per row, in tree order."""
    tree = build_tree([np.array(row, dtype=np.int64) for row in rows])
    return Sharing(tree.length[tree.order].tolist(), tree.lcp.tolist())


def score(units: Sharing, passes: list[list[int]], pass_rows: int) -> int:
    return sum(units.rows(one) for one in passes) + pass_rows * len(passes)


def check(plan: PassPlan, units: Sharing, capacity: int) -> None:
    """Every unit once; every pass within the capacity unless of one unit; rows and bounds as they are said to be."""
    assert sorted(unit for one in plan.passes for unit in one) == list(range(len(units)))
    for one, rows in zip(plan.passes, plan.rows, strict=True):
        assert rows == naive_rows(units.lengths, units.shared, one)
        assert rows <= capacity or len(one) == 1
    assert sum(plan.rows) >= plan.bound.rows
    assert len(plan.passes) >= plan.bound.passes


@given(rows=rows_of_tokens, chosen=st.data())
def test_rows_of_a_set_are_those_of_its_packed_tree(rows: list[list[int]], chosen: st.DataObject) -> None:
    arrays = [np.array(row, dtype=np.int64) for row in rows]
    tree = build_tree(arrays)
    units = Sharing(tree.length[tree.order].tolist(), tree.lcp.tolist())
    some = sorted(chosen.draw(st.sets(st.integers(0, len(rows) - 1), min_size=1)))
    alone = build_tree([arrays[int(tree.order[unit])] for unit in some])
    assert units.rows(some) == layout_rows(alone, Layout.full_sharing())
    assert units.rows(some) == naive_rows(units.lengths, units.shared, some)


@given(rows=rows_of_tokens, capacity=st.integers(1, 40), pass_rows=st.integers(0, 20))
def test_a_few_units_are_planned_as_well_as_can_be(rows: list[list[int]], capacity: int, pass_rows: int) -> None:
    units = units_of(rows)
    plan = plan_passes(units, capacity, pass_rows=pass_rows)
    check(plan, units, capacity)
    best, _ = naive_passes(units.lengths, units.shared, capacity, pass_rows)
    assert plan.score == best
    assert plan.optimal
    assert plan.bound_score <= best


@given(rows=many_rows, capacity=st.integers(4, 200), pass_rows=st.integers(0, 20), data=st.data())
@settings(max_examples=150)
def test_many_units_are_planned_soundly_and_in_any_order_alike(
    rows: list[list[int]], capacity: int, pass_rows: int, data: st.DataObject
) -> None:
    units = units_of(rows)
    plan = plan_passes(units, capacity, pass_rows=pass_rows)
    check(plan, units, capacity)
    assert plan.score <= score(units, cut_in_order(units, capacity), pass_rows)
    shuffled = units_of(data.draw(st.permutations(rows)))
    assert plan_passes(shuffled, capacity, pass_rows=pass_rows) == plan


@given(rows=rows_of_tokens, capacity=st.integers(1, 40), pass_rows=st.integers(0, 20))
def test_what_is_claimed_to_be_optimal_without_comparing_all_plans_is(
    rows: list[list[int]], capacity: int, pass_rows: int
) -> None:
    units = units_of(rows)
    best = score(units, exact_passes(units, capacity, pass_rows), pass_rows)
    heuristic = plan_passes(units, capacity, pass_rows=pass_rows, most_exact=0)
    check(heuristic, units, capacity)
    assert heuristic.score >= best
    assert heuristic.score == best or not heuristic.optimal


@given(sizes=st.lists(st.integers(0, 30), max_size=70), capacity=st.integers(1, 40))
def test_bins_hold_every_piece_once_and_no_two_nearly_empty_ones(sizes: list[int], capacity: int) -> None:
    bins = fill_bins(sizes, capacity)
    assert sorted(number for one in bins for number in one) == list(range(len(sizes)))
    sums = [sum(sizes[number] for number in one) for one in bins]
    assert all(total <= capacity or len(one) == 1 for total, one in zip(sums, bins, strict=True))
    # Whatever fits beside the first piece of a bin is tried: no two bins could be one.
    assert all(a + b > capacity for number, a in enumerate(sums) for b in sums[number + 1 :])
