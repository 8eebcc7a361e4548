"""What observations add to a price, against a naive search and against the incidents that made it necessary."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_rank.memory.keep import KEPT, LATEST
from trainer_rank.memory.residual import Residual, fit
from trainer_rank.memory.seen import Seen
from trainer_rank.units import GIB, MIB


def seen(rows: int, missing: int, *, tokens: int | None = None, predicted: int = 10**9) -> Seen:
    """A pass whose price was short of ``missing`` bytes."""
    return Seen(
        packed_rows=rows, logical_tokens=rows if tokens is None else tokens, predicted_bytes=predicted,
        peak_bytes=predicted + missing,
    )  # fmt: skip


def test_nothing_seen_adds_nothing() -> None:
    """Nor does a price that was always enough."""
    assert Residual().extra_bytes(10_000, 10_000, 10**9) == 0
    enough = fit([seen(100, -5), seen(5000, -MIB)])
    assert enough.extra_bytes(10_000, 10_000, 10**9) == 0


def test_a_fixed_cost_and_a_rate_are_told_apart() -> None:
    """The documents' fit, 66.6 MiB and 459,782 bytes per packed row, from data made so, and no margin on exact data."""
    fixed, rate = int(66.6 * MIB), 459_782
    draw = np.random.default_rng(0)
    rows = draw.integers(500, 17_000, 20).tolist()
    found = fit(seen(one, fixed + rate * one, tokens=one * int(draw.integers(1, 9)), predicted=0) for one in rows)
    assert found.intercept == pytest.approx(fixed, rel=1e-6)
    assert found.per_row == pytest.approx(rate, rel=1e-9)
    assert found.per_token == pytest.approx(0, abs=1e-3)
    assert found.margin < 10
    assert found.extra_bytes(16_205, 109_065, 0) == pytest.approx(fixed + rate * 16_205, rel=1e-9)


def test_a_short_warm_up_does_not_poison_a_long_pass() -> None:
    """27 tokens that needed 1 GiB more than priced are a fixed cost of 1 GiB until a longer pass says otherwise."""
    found = Residual().observe(seen(27, GIB))
    assert found.extra_bytes(20_000, 20_000, 10**9) == pytest.approx(GIB, abs=4)
    later = found.observe(seen(20_000, GIB))
    assert later.extra_bytes(20_000, 20_000, 10**9) == pytest.approx(GIB, abs=4)
    assert later.extra_bytes(27, 27, 10**9) == pytest.approx(GIB, abs=4)


def test_a_large_observation_that_was_priced_right_blocks_nothing() -> None:
    """129 GB observed where 129 GB were predicted teach nothing; the smaller pass costs its own price."""
    found = Residual().observe(seen(73_696, 0, predicted=129 * 10**9))
    assert found.extra_bytes(21_487, 21_487, 38 * 10**9) == 0


def test_a_large_observation_that_was_priced_wrong_charges_a_smaller_pass_no_more_than_its_share() -> None:
    """What grew with rows in what was seen grows with rows."""
    found = fit([seen(1000, 10**6), seen(70_000, 70 * 10**6)])
    assert found.extra_bytes(21_487, 21_487, 10**9) == pytest.approx(21_487 * 1000, rel=1e-3)


def test_a_large_observation_far_above_its_price_blocks_nothing_smaller() -> None:
    """129 GB where 6 GB were predicted: whatever is smaller is charged no more than the 129 GB that fitted."""
    found = Residual().observe(seen(73_696, 123 * 10**9, predicted=6 * 10**9))
    for rows in (53_000, 21_487, 27):
        predicted = 6 * 10**9 * rows // 73_696
        assert predicted + found.extra_bytes(rows, rows, predicted) <= 129 * 10**9


def test_what_was_seen_to_fit_is_charged_no_more_than_it_took() -> None:
    """Though another observation raised the fit: the margin and the others' excess stop at its own peak."""
    found = fit([seen(1000, 900 * MIB), seen(2000, 100 * MIB), seen(3000, 10 * MIB), seen(500, 0), seen(700, 5)])
    assert found.extra_bytes(3000, 3000, 10**9) == 900 * MIB
    assert found.extra_bytes(3001, 3001, 10**9) > 900 * MIB
    # Contradictory observations of one size: the highest counts.
    twice = fit([seen(1000, MIB), seen(1000, 90 * MIB), seen(1000, 2 * MIB)])
    assert twice.extra_bytes(1000, 1000, 10**9) == 90 * MIB


def test_the_same_tokens_on_a_third_of_the_rows_are_smaller_work() -> None:
    """129 GB where 6 GB were predicted, sharing nothing; shared, the same requests fit into 80 GiB."""
    found = Residual().observe(seen(73_696, 123 * 10**9, predicted=6 * 10**9))
    predicted = 6 * 10**9 * 21_487 // 73_696
    assert predicted + found.extra_bytes(21_487, 73_696, predicted) <= 80 * GIB


observations = st.lists(
    st.builds(
        lambda rows, sharing, missing: seen(rows, missing, tokens=rows * sharing),
        st.integers(1, 20_000),
        st.integers(1, 20),
        st.integers(-(10**6), 10**9),
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=150)
@given(observations)
def test_no_observation_lies_above_the_fit(batch: list[Seen]) -> None:
    """Not by a byte."""
    found = fit(batch)
    for one in batch:
        assert found.extra_bytes(*one.size) >= one.missing_bytes


def history(kind: str, count: int, seed: int) -> list[Seen]:
    """Passes of all sizes that were short of something: of a cost that scatters, of one that bends, of rare ones."""
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        rows = int(draw.integers(50, 16_000))
        tokens, chance = int(rows * draw.uniform(1, 8)), float(draw.uniform())
        short = {
            "scatters": 50e6 + 2000 * rows + 20e6 * chance,
            "bends": 1e6 * rows**0.5 * (0.8 + 0.2 * chance),
            "rare": 500e6 if chance > 0.97 else -1e6,
        }[kind]
        found.append(seen(rows, int(short), tokens=tokens, predicted=300_000 * rows + 20_000 * tokens))
    return found


@pytest.mark.parametrize("kind", ["scatters", "bends", "rare"])
def test_of_a_long_history_nothing_is_forgotten_that_matters(kind: str) -> None:
    """What is kept is bounded; no pass that ever ran is charged less than it needed, and few are charged more."""
    batch = history(kind, 3 * KEPT, seed=1)
    found = Residual()
    for one in batch:
        found = found.observe(one)
    assert len(found.seen) == KEPT
    charged = [one.predicted_bytes + found.extra_bytes(*one.size) for one in batch]
    needed = [max(one.predicted_bytes, one.peak_bytes) for one in batch]
    assert all(ours >= least for ours, least in zip(charged, needed, strict=True))
    if kind != "rare":
        assert float(np.median(np.array(charged) / np.array(needed))) < 1.01


@pytest.mark.parametrize("kind", ["scatters", "bends", "rare"])
def test_what_is_kept_is_all_there_is(kind: str) -> None:
    """The residual is a function of it, so one that comes back from a checkpoint prices to the byte as the one that
    went on."""
    found = Residual()
    for number, one in enumerate(history(kind, KEPT + 40, seed=2)):
        found = found.observe(one)
        if number % 12 == 0:
            assert Residual.from_json(found.to_json()) == found
    assert found.observe(*found.seen[-LATEST:]) == found


@pytest.mark.parametrize("kind", ["scatters", "bends", "rare"])
def test_what_ran_costs_no_more_than_passes_no_larger_needed(kind: str) -> None:
    """To the byte, for as many sizes as are kept, whatever the others taught."""
    batch = history(kind, KEPT, seed=3)
    found = fit(batch)
    for one in batch:
        no_larger = [
            other.peak_bytes
            for other in batch
            if all(small <= large for small, large in zip(other.size, one.size, strict=True))
        ]
        limit = max(one.predicted_bytes, *no_larger)
        assert one.predicted_bytes + found.extra_bytes(*one.size) <= limit


@settings(deadline=None, max_examples=100)
@given(observations, st.tuples(*[st.integers(1, 10**5)] * 3), st.tuples(*[st.integers(0, 10**5)] * 3))
def test_a_larger_pass_never_costs_less(
    batch: list[Seen], size: tuple[int, int, int], more: tuple[int, int, int]
) -> None:
    """In rows, tokens and traced price."""
    found = fit(batch)
    larger = tuple(one + other for one, other in zip(size, more, strict=True))
    prices = [
        predicted + found.extra_bytes(rows, tokens, predicted)
        for rows, tokens, predicted in ((size[0], size[1], 10**4 * size[2]), (larger[0], larger[1], 10**4 * larger[2]))
    ]
    assert prices[1] >= prices[0]


@settings(deadline=None, max_examples=60)
@given(observations)
def test_no_function_of_a_grid_exceeds_the_observations_less(batch: list[Seen]) -> None:
    """The naive twin: all coefficients on a grid that are feasible; none has a smaller sum."""
    found = fit(batch)
    missing = np.array([max(0, one.missing_bytes) for one in batch], dtype=float)
    design = np.array([[1, one.packed_rows, one.logical_tokens] for one in batch], dtype=float)
    ours = float((design @ np.array([found.intercept, found.per_row, found.per_token]) - missing).sum())
    top = missing.max()
    steps = np.linspace(0, 1, 9)
    for a, b, c in itertools.product(steps, steps, steps):
        naive = np.array([a * top, b * top / design[:, 1].max(), c * top / design[:, 2].max()])
        left = design @ naive - missing
        if (left >= 0).all():
            assert ours <= float(left.sum()) + 1e-6 * (1 + top) * len(batch)


def test_the_margin_shrinks_as_observations_agree() -> None:
    """It is what they leave over, divided by how many are free to differ."""
    draw = np.random.default_rng(1)
    margins = []
    for count in (5, 12, 30):
        noise = draw.integers(0, 10 * MIB, count).tolist()
        margins.append(fit(seen(1000 * (1 + n % 5), GIB + one) for n, one in enumerate(noise)).margin)
    assert margins[0] > margins[1] > margins[2] > 0


def test_the_worst_is_not_forgotten_for_many_that_are_alike() -> None:
    """However many passes run that were short of next to nothing."""
    found = Residual().observe(seen(1000, 50 * MIB)).observe(seen(10_000, 500 * MIB))
    before = found.extra_bytes(10_000, 10_000, 10**9)
    for number in range(2 * KEPT):
        found = found.observe(seen(500 + number, 10))
    assert len(found.seen) == KEPT
    assert found.extra_bytes(10_000, 10_000, 10**9) >= 500 * MIB
    assert found.extra_bytes(10_000, 10_000, 10**9) <= 1.1 * before


@pytest.mark.parametrize(
    "values", [[1, 2, 3], [1, 2, 3, 4, 5, 6], [1, 2, 3, -4], [1, 2, 3, 2**63], [1, 2, 3, 4.0], [1, 2, 3, True], "1234"]
)
def test_values_that_are_no_observation_are_refused(values: list[int]) -> None:
    """The message shows them."""
    with pytest.raises(ValueError, match="an observation must be 4 or 5 whole numbers"):
        Residual.from_json([values])
