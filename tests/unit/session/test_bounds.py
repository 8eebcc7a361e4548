"""Bounds that rule out split work, through admission: sound ones change no verdict, and two that lie are caught."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import BentMeter
from tests.lying_pricers import CappedPricing, RetainedPricing, capped_price
from tests.property.strategies import Rows, token_rows
from trainer_rank.admission import Admission, Budget
from trainer_rank.errors import TrainerRankMemoryError
from trainer_rank.memory import ForwardShape, LowerBound, ModelFacts, Profile, ProfileBook, RecomputeReading
from trainer_rank.memory.profile import ProfileModel
from trainer_rank.memory.signature import ONE_LAYER, SINGLE, MemorySignature, RecomputeSetting
from trainer_rank.meters import SimulatedMeter
from trainer_rank.planner import work as work_module
from trainer_rank.prefix import Layout, PrefixTree
from trainer_rank.requests import AtomicGroup, Request, flatten
from trainer_rank.session.candidates import Candidate, Candidates
from trainer_rank.session.gate import Gate
from trainer_rank.session.optimizer import Optimizer
from trainer_rank.session.profile_pricing import ProfilePricing
from trainer_rank.session.units import plan_order

BUDGET = 10_737_418_240
FACTS = ModelFacts(
    family="llama", num_layers=16, hidden_size=8192, num_heads=64, num_key_value_heads=8, head_size=128,
    vocabulary_size=1000, max_positions=40_000, dtype="bfloat16", weight_bytes=0, trainable_bytes=0, num_trainable=0,
    largest_trainable_bytes=0, adapter=None,
)  # fmt: skip


def fixture_runtime(setting: RecomputeSetting) -> Any:
    """Return what pricing and admission read of a model that does not run."""
    reading = RecomputeReading(decoder=setting, decoder_training=True, built_with=setting, all_training=True)
    return SimpleNamespace(facts=FACTS, recompute="none", recompute_reading=reading, trainable_parameters=lambda: ())


class Unpruned:
    """A pricer without its bound."""

    def __init__(self, inner: ProfilePricing) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def at_least(self, forwards: Sequence[Sequence[Request]]) -> LowerBound | None:
        return None


def together(pricing: Any, nest: Any, budget_bytes: int) -> tuple[Candidate, Admission] | None:
    """Return what split admission makes of requests whose graphs stay alive together; None when it refuses."""
    flat = flatten(nest)
    runtime = pricing._runtime
    units = [unit for group in plan_order(flat, FACTS) for unit in group]
    meter = BentMeter(SimulatedMeter("1TiB"), lambda reading: replace(reading, available_bytes=budget_bytes))
    gate = Gate(
        runtime, meter, Optimizer(()), max_packed_tokens=None, head_chunk_rows=512, record=lambda *_: 0
    )  # fmt: skip
    try:
        return gate.admit_together(flat, Candidates(flat.leaves, units, pricing, None, None, FACTS))
    except TrainerRankMemoryError:
        return None


def refused_by_a_bound(pricing: ProfilePricing, nest: Any, budget_bytes: int) -> bool:
    """Return whether admission refuses with the bound what it admits without."""
    pruned, naive = (together(one, nest, budget_bytes) for one in (pricing, Unpruned(pricing)))
    assert naive is not None or pruned is None
    return pruned is None and naive is not None


def signature(*grad_modes: bool, recompute: str) -> MemorySignature:
    return MemorySignature(mix=(SINGLE,), grad_modes=grad_modes, adapters=("",), recompute=recompute)


def learned(rate: int, *, kept: int | None = None, rows: int = 1000, ratio: int = 1) -> Profile:
    retained = None if kept is None else Fraction(kept)
    return Profile(peak_rate=Fraction(rate), retained_rate=retained, packed_rows=rows, ratio=Fraction(ratio))


# Two duplicate pairs of 16,000 tokens, one pair with graph and one without.
STATIC = 131_072
PAIRS = [
    Request(tokens=np.full(16_000, number), labels=np.full(16_000, 1), no_grad=no_grad)
    for number, no_grad in ((1, False), (1, False), (2, True), (2, True))
]


def pairs_pricing(kind: type[ProfilePricing]) -> ProfilePricing:
    """Profiles of 1,000 rows without sharing: 16 times the static rate for all four, 4 times for each pair."""
    book = ProfileBook(
        {
            signature(False, True, recompute="none"): learned(16 * STATIC),
            signature(True, recompute="none"): learned(4 * STATIC),
            signature(False, recompute="none"): learned(4 * STATIC),
        }
    )
    return kind(fixture_runtime(RecomputeSetting()), book)


@pytest.fixture
def no_sharing_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout tried before full sharing shares nothing."""
    monkeypatch.setattr(work_module, "choose_layout", lambda tree, _: Layout.no_sharing())


@pytest.mark.usefixtures("no_sharing_first")
def test_the_bound_that_lied() -> None:
    """Both pairs unshared need 9,227,750,400 bytes of 10,737,418,240; the bound says 18,455,219,200 at least."""
    pricing = pairs_pricing(CappedPricing)
    assert pricing._model.static_bytes_per_row == STATIC
    admitted = together(Unpruned(pricing), PAIRS, BUDGET)
    assert admitted is not None
    candidate, verdict = admitted
    assert [sum(work.batch.packed_rows for work in forward.works) for forward in candidate.forwards] == [32_000] * 2
    assert sum(request.labels.size for request in PAIRS if request.labels is not None) * 4 == 256_000
    assert verdict.charged_bytes == 9_227_750_400
    assert pricing.at_least([PAIRS[:2], PAIRS[2:]]) == LowerBound(18_455_219_200)
    # Every part of the rest of the ladder is too large as well, so that the whole call is refused.
    assert refused_by_a_bound(pricing, PAIRS, BUDGET)


@pytest.mark.usefixtures("no_sharing_first")
@pytest.mark.parametrize("budget", [BUDGET, 18_455_219_199, 18_455_219_200, 36 * 10**9, 37 * 10**9])
def test_the_same_requests_under_the_formula_as_it_is(budget: int) -> None:
    """The learned rate stays in force: their unshared price is no lower than their shared one, and the bound holds."""
    pricing = pairs_pricing(ProfilePricing)
    bound = pricing.at_least([PAIRS[:2], PAIRS[2:]])
    # 1.10 * 2 * (128,000 + 524,288 * 32,000), as their logical tokens count in every layout.
    assert bound == LowerBound(36_910_156_800)
    assert not refused_by_a_bound(pricing, PAIRS, budget)
    assert (together(pricing, PAIRS, budget) is not None) == (budget >= bound.num_bytes)


def test_a_sweep_at_a_fixed_ratio_does_not_find_the_lie() -> None:
    """Which is how it went unnoticed; at fixed tokens the price falls."""
    model = ProfileModel(num_layers=16, hidden_size=8192, vocabulary_size=1000, element_size=2)

    def price(rows: int, tokens: int) -> int:
        shape = ForwardShape(packed_rows=rows, logical_tokens=tokens, output_bytes=4 * tokens, packed=False)
        return capped_price(model, shape, learned(4 * STATIC)).required_bytes

    sweep = [price(rows, 2 * rows) for rows in range(500, 40_000, 250)]
    assert sweep == sorted(sweep)
    assert price(32_000, 32_000) < price(16_000, 32_000)


@pytest.mark.usefixtures("no_sharing_first")
@pytest.mark.parametrize("recompute", [ONE_LAYER, RecomputeSetting()], ids=["packed", "by tokens"])
def test_sharing_rescues_a_batch_only_where_packed_rows_price_it(recompute: RecomputeSetting) -> None:
    """Under a profile without sharing: 4 duplicates of 1,000 tokens, with room for 2,000 rows."""
    book = ProfileBook({signature(True, recompute=recompute.name): learned(4 * STATIC)})
    pricing = ProfilePricing(fixture_runtime(recompute), book)
    nest = AtomicGroup([Request(tokens=np.full(1000, 1), labels=np.full(1000, 1)) for _ in range(4)])
    found = together(pricing, [nest], 11 * (4 * STATIC * 2000 + 6144 * 4000 + 16_000) // 10)
    if recompute is ONE_LAYER:
        assert found is not None
        assert [work.batch.packed_rows for work in found[0].works] == [1000]
    else:
        assert found is None


def branches(first: int) -> AtomicGroup:
    """32 requests of 100 tokens that stay together: 80 tokens shared by all, then 20 shared by each half."""
    rows = [np.concatenate([np.full(80, first), np.full(20, first + 1 + half)]) for half in (0, 1)]
    return AtomicGroup([Request(tokens=row, labels=np.full(100, 1)) for row in rows for _ in range(16)])


@pytest.fixture
def roots_replayed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout tried before full sharing computes what all share once per branch."""

    def choose(tree: PrefixTree, segment_rows: int) -> Layout:
        return Layout.mixed(tuple((tree.parent >= 0).tolist()))

    monkeypatch.setattr(work_module, "choose_layout", choose)


@pytest.mark.usefixtures("roots_replayed_first")
def test_a_retained_price_that_is_no_bound() -> None:
    """Full sharing is outside the window of the ratio, 3,200 tokens on 120 rows; on 200 rows the group is inside it.

    The profile saw 2 tokens per row, and is trusted up to 16.
    """
    book = ProfileBook({signature(True, recompute="full/uniform/1"): learned(100_000, kept=1000, ratio=2)})
    nest = [branches(10), branches(20)]
    honest, lying = (kind(fixture_runtime(ONE_LAYER), book) for kind in (ProfilePricing, RetainedPricing))
    admitted = together(Unpruned(honest), nest, 70 * 10**6)
    assert admitted is not None
    candidate, verdict = admitted
    assert [forward.works[0].batch.packed_rows for forward in candidate.forwards] == [200, 200]
    # 1.10 * (12,800 + 100,000 * 200 + 6,144 * 3,200), and 1.10 * (12,800 + 1,000 * 200 + 6,144 * 3,200)
    assert verdict.charged_bytes == 43_640_960 + 21_860_960
    assert refused_by_a_bound(lying, nest, 70 * 10**6)
    for budget in (70 * 10**6, verdict.charged_bytes, verdict.charged_bytes - 1):
        assert not refused_by_a_bound(honest, nest, budget)


@settings(max_examples=150, deadline=None)
@given(
    rows=token_rows(max_rows=6, max_tokens=5),
    modes=st.lists(st.booleans(), min_size=6, max_size=6),
    repeat=st.sampled_from([1, 20]),
    rate=st.integers(0, 2_000_000),
    kept=st.none() | st.integers(0, 2_000_000),
    seen=st.integers(1, 6),
    ratio=st.integers(1, 3),
    full=st.booleans(),
    share=st.floats(0.2, 1.2),
)
def test_the_bound_of_the_profile_pricer_changes_no_verdict(
    rows: Rows,
    modes: list[bool],
    repeat: int,
    rate: int,
    kept: int | None,
    seen: int,
    ratio: int,
    full: bool,
    share: float,
) -> None:
    """Random batches, profiles and budgets, through split admission and through each range by itself."""
    setting = ONE_LAYER if full else RecomputeSetting()
    known = learned(rate, kept=kept, rows=seen, ratio=ratio)
    kinds = [signature(*modes, recompute=setting.name) for modes in ((True,), (False,), (False, True))]
    pricing = ProfilePricing(fixture_runtime(setting), ProfileBook(dict.fromkeys(kinds, known)))
    requests = [
        Request(tokens=np.repeat(row, repeat), labels=np.full(repeat * len(row), 1), no_grad=mode)
        for row, mode in zip(rows, modes, strict=False)
    ]
    flat = flatten(requests)
    units = [unit for group in plan_order(flat, FACTS) for unit in group]
    whole = Candidates(flat.leaves, units, Unpruned(pricing), None, None, FACTS)  # type: ignore[arg-type]
    plenty = Budget(budget_bytes=1, resident_bytes=0, available_bytes=2**62)
    candidate, _ = whole.admission(whole.everything, plenty, ())
    offered = int(share * candidate.price.required_bytes)
    assert not refused_by_a_bound(pricing, requests, offered)
    budget = replace(plenty, available_bytes=offered)
    pruned = Candidates(flat.leaves, units, pricing, None, None, FACTS)
    for stop in range(1, len(units) + 1):
        found, wanted = (group.admission(tuple(range(stop)), budget, ()) for group in (pruned, whole))
        assert found[1].admitted == wanted[1].admitted
        if found[1].admitted:
            assert (found[0].layout, found[0].price) == (wanted[0].layout, wanted[0].price)
