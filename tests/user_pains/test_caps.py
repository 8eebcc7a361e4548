"""Rows 9 and 10: a cap per pass is hard, and a request above it is named instead of running anyway."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import negative_sum, tiny_runtime, tokens
from trainer_rank import Request, TrainerRank
from trainer_rank.admission import Budget
from trainer_rank.errors import TrainerRankMemoryError
from trainer_rank.memory import ModelFacts, Price, Term
from trainer_rank.planner.fit import FittedPasses, fit_passes
from trainer_rank.requests import flatten
from trainer_rank.session.candidates import Candidates
from trainer_rank.session.pricing import PassByPass
from trainer_rank.session.units import plan_order

FACTS = ModelFacts(
    family="llama", num_layers=2, hidden_size=8, num_heads=2, num_key_value_heads=1, head_size=4,
    vocabulary_size=200_000, max_positions=40_000, dtype="float32", weight_bytes=0, trainable_bytes=0, num_trainable=0,
    largest_trainable_bytes=0, adapter=None,
)  # fmt: skip
NOTHING = Price(required_bytes=0, retained_bytes=0, terms=(Term(name="nothing", num_bytes=0),), phase="none")
PLENTY = Budget(budget_bytes=1, resident_bytes=0, available_bytes=1)


def rows_by_pass(lengths: Sequence[int], cap: int) -> list[int]:
    """Packed rows of each pass of requests that share nothing, cut as the rank cuts them when memory never runs out."""
    requests = [Request.next_token([number * 10 + 1] * length) for number, length in enumerate(lengths)]
    (units,) = plan_order(flatten(requests), FACTS)
    group = Candidates(flatten(requests).leaves, units, PassByPass(lambda work: NOTHING, FACTS), None, cap, FACTS)
    found = fit_passes(group.sharing, lambda units: 0.0 if group.within_cap(tuple(units)) else math.inf, most_rows=cap)
    assert isinstance(found, FittedPasses)
    assert sorted(index for one in found.passes for index in group.indices(one)) == list(range(len(lengths)))
    passes = [group.admission(one, PLENTY, ())[0].works for one in found.passes]
    return [sum(work.batch.packed_rows for work in works) for works in passes]


@pytest.mark.parametrize(("lengths", "cap", "passes"), [([7] * 8, 8, 8), ([30_720] * 16, 32_768, 16), ([4] * 8, 8, 4)])
def test_the_number_of_passes_is_not_the_total_over_the_cap(lengths: list[int], cap: int, passes: int) -> None:
    """The report had ceil(56 / 8) = 7 passes and ceil(491,520 / 32,768) = 15, some of them above the cap."""
    found = rows_by_pass(lengths, cap)
    assert len(found) == passes
    assert max(found) <= cap


@settings(deadline=None, max_examples=60)
@given(lengths=st.lists(st.integers(2, 40), min_size=1, max_size=30), spare=st.integers(0, 30))
def test_every_pass_is_within_the_cap_and_every_request_comes_once(lengths: list[int], spare: int) -> None:
    """For any lengths and any cap that admits the longest."""
    assert max(rows_by_pass(lengths, max(lengths) + spare)) <= max(lengths) + spare


def test_one_request_above_the_cap_is_named_and_one_at_it_runs() -> None:
    """21 tokens under a cap of 20: refused by index, length and cap, the others unaffected when asked to skip."""
    rank = TrainerRank(tiny_runtime(), memory_budget="8GiB", max_packed_tokens=20)
    long, exact = (Request.next_token(tokens(number, length)) for number, length in ((1, 21), (2, 20)))
    with pytest.raises(TrainerRankMemoryError, match=r"request 1 of 21 tokens .* max_packed_tokens is 20"):
        next(rank.forward_micro_batches([exact, long]))
    assert [one.stats.packed_rows for one in rank.forward_micro_batches([exact])] == [20]
    micro_batches = rank.forward_micro_batches([exact, long, exact], on_refuse="skip")
    for micro_batch in micro_batches:
        negative_sum(micro_batch).backward()
        assert micro_batch.indices == (0, 2)
    assert [(one.index, one.num_tokens) for one in micro_batches.skipped] == [(1, 21)]
