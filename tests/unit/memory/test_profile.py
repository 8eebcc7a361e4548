"""Prices by learned bytes per packed row: exact values, sweeps and edges, each derived from the formula."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from math import floor

import pytest

from trainer_rank.memory.profile import ForwardShape, Profile, ProfileModel, gated_delta_net_state_bytes, price_forward
from trainer_rank.memory.profile_book import ProfileBook
from trainer_rank.memory.signature import SINGLE, MemorySignature, packed_priced

MODEL = ProfileModel(num_layers=8, hidden_size=64, vocabulary_size=1000, element_size=2)
STATIC = 64 * 2 * 6
"""Bytes per row: 8 // 4 + 4 = 6 layers."""

RATE = Fraction(100_000)
"""Ratio 2 is in every profile below."""


def profile(
    *, rate: Fraction | int = RATE, kept: Fraction | int | None = 40_000, rows: int = 1000, ratio: int = 2
) -> Profile:
    return Profile(
        peak_rate=Fraction(rate),
        retained_rate=None if kept is None else Fraction(kept),
        packed_rows=rows,
        ratio=Fraction(ratio),
    )


def shape(rows: int, tokens: int, *, packed: bool = True, outputs: int = 0, segments: int = 0) -> ForwardShape:
    return ForwardShape(packed_rows=rows, logical_tokens=tokens, packed=packed, output_bytes=outputs, segments=segments)


def required(rows: int, tokens: int, known: Profile | None = None, **fields: object) -> int:
    one = shape(rows, tokens, **fields)  # type: ignore[arg-type]
    return price_forward(MODEL, one, profile() if known is None else known).required_bytes


def retained(rows: int, tokens: int, known: Profile | None = None, **fields: object) -> int:
    one = shape(rows, tokens, **fields)  # type: ignore[arg-type]
    return price_forward(MODEL, one, profile() if known is None else known).retained_bytes


@pytest.mark.parametrize(
    ("layers", "factor"), [(1, 4), (3, 4), (4, 5), (8, 6), (40, 14), (47, 15), (48, 16), (200, 16)]
)
def test_the_static_estimate(layers: int, factor: int) -> None:
    model = replace(MODEL, num_layers=layers)
    assert model.static_bytes_per_row == 64 * 2 * factor
    cold = price_forward(model, shape(1000, 3000, outputs=77), None)
    assert cold.required_bytes == floor(Fraction(11, 10) * (77 + 1000 * 64 * 2 * factor))
    assert cold.retained_bytes == cold.required_bytes


def test_an_expert_floor_is_a_maximum_with_the_static_estimate() -> None:
    assert replace(MODEL, expert_bytes_per_row=STATIC - 1).static_bytes_per_row == STATIC
    assert replace(MODEL, expert_bytes_per_row=STATIC + 1).static_bytes_per_row == STATIC + 1


def test_outputs() -> None:
    assert MODEL.output_bytes(labels=10, top_k_entries=3, logits_rows=2, hidden_states_rows=5) == (
        4 * 10 + 12 * 3 + 1000 * 2 * 2 + 64 * 2 * 5
    )


def test_states_of_a_gated_delta_net() -> None:
    """Those of Qwen3.6-35B-A3B."""
    assert (
        gated_delta_net_state_bytes(
            value_heads=32, key_heads=16, key_size=128, value_size=128, kernel=4, element_size=2
        )
        == 4_292_608
    )


@pytest.mark.parametrize(
    ("grad_modes", "mix", "expected"),
    [
        # 1.10 * (4,000 + 100,000 * 500 + 6,144 * 4,000)
        ((True,), (SINGLE,), 82_038_000),
        # 1.10 * (4,000 + 100,000 * max(500, 4,000 / 2))
        ((False,), (SINGLE,), 220_004_400),
        ((False, True), (SINGLE,), 220_004_400),
        ((True,), ("hidden_states", SINGLE), 220_004_400),
        ((True,), ("target:(2,)",), 220_004_400),
    ],
)
def test_packed_and_extrapolated_at_ratio_two(
    grad_modes: tuple[bool, ...], mix: tuple[str, ...], expected: int
) -> None:
    """Beyond the profile's ratio of 2, within its 8-fold window; only training on single targets goes by rows."""
    signature = MemorySignature(mix=mix, grad_modes=grad_modes, adapters=("",), recompute="full/uniform/1")
    packed = packed_priced(signature, True)
    assert required(500, 4000, outputs=4000, packed=packed) == expected


def test_retained_charges() -> None:
    # 1.10 * (4,000 + 40,000 * 500 + 6,144 * 4,000)
    assert retained(500, 4000, outputs=4000) == 49_038_000
    # 1.10 * (4,000 + 40,000 * max(500, 4,000 / 2))
    assert retained(500, 4000, outputs=4000, packed=False) == 88_004_400
    # Never more than required.
    greedy = profile(rate=1000, kept=900_000)
    assert retained(500, 4000, greedy) == required(500, 4000, greedy)
    # Not measured.
    assert retained(500, 4000, profile(kept=None)) == required(500, 4000)


@pytest.mark.parametrize("packed", [True, False])
def test_retained_is_required_outside_a_trust_window(packed: bool) -> None:
    """Both windows are closed: the ratio at 8 * 2, the rows at 8 * 1,000."""
    inside, beyond_ratio = (100, 1600), (100, 1601)
    at_rows, beyond_rows = (8000, 16_000), (8001, 16_002)
    for rows, tokens in (inside, at_rows):
        assert retained(rows, tokens, packed=packed) < required(rows, tokens, packed=packed)
    for rows, tokens in (beyond_ratio, beyond_rows):
        assert retained(rows, tokens, packed=packed) == required(rows, tokens, packed=packed)


def test_sharing_is_extrapolated_eight_fold() -> None:
    """Beyond 16 logical tokens per row a row is charged for each 16 of them."""
    assert required(100, 1600) == floor(Fraction(11, 10) * (RATE * 100 + 6144 * 1600))
    assert required(100, 3200) == floor(Fraction(11, 10) * (RATE * 200 + 6144 * 3200))
    assert required(200, 3200) == required(100, 3200)
    assert required(100, 1601) == floor(Fraction(11, 10) * (RATE * Fraction(1601, 16) + 6144 * 1601))


def test_the_charge_per_segment() -> None:
    """Only where packed rows price a forward, and only in required."""
    hybrid = replace(MODEL, state_bytes=4_292_608)
    known = profile()

    def price(segments: int, *, packed: bool = True) -> tuple[int, int]:
        found = price_forward(hybrid, shape(500, 4000, segments=segments, packed=packed), known)
        return found.required_bytes, found.retained_bytes

    plain = price(0)
    assert price(101)[0] == floor(Fraction(11, 10) * (RATE * 500 + 6144 * 4000 + 101 * 4_292_608))
    assert price(101)[1] == plain[1]
    assert price(101, packed=False) == price(0, packed=False)


def rows_of(tokens: int) -> Iterator[int]:
    """Every layout's rows, from full sharing to none."""
    return iter(range(1, tokens + 1, 7))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("rate", [1, 24_575, 100_000])
def test_cost_never_falls_as_packed_rows_grow(rate: int, packed: bool) -> None:
    """At fixed logical tokens, across the static estimate, L / (8 r) and the windows: 24,575 is one below 4 * 6,144."""
    found = [required(rows, 20_000, profile(rate=rate), packed=packed) for rows in rows_of(20_000)]
    assert found == sorted(found)


@pytest.mark.parametrize("ratio", [1, 2, 5])
def test_a_sweep_across_the_clamp_is_monotone(ratio: int) -> None:
    edge = 8000 // (8 * ratio)
    found = [required(rows, 8000, profile(ratio=ratio)) for rows in range(edge - 50, edge + 50)]
    assert found == sorted(found)
    assert found[0] == found[50]
    assert found[51] > found[50]


def test_no_downward_jump_at_the_edge_of_the_rows_window() -> None:
    """At a fixed sharing ratio and at fixed logical tokens: the rate stays in force beyond 8 times the rows."""
    for packed in (True, False):
        for ratio in (1, 2, 6):
            at = [required(rows, ratio * rows, packed=packed) for rows in range(7990, 8011)]
            assert at == sorted(at)
            assert at[-1] > at[0]
        at = [required(rows, 16_000, packed=packed) for rows in range(7990, 8011)]
        assert at == sorted(at)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("learned", [3, 8, 72])
def test_more_sharing_learned_never_cheapens_what_was_within_the_older_ratio(learned: int, packed: bool) -> None:
    for rows in range(1, 2000, 13):
        for tokens in (rows, rows + rows // 2, 2 * rows):
            before = required(rows, tokens, packed=packed)
            assert required(rows, tokens, profile(ratio=learned), packed=packed) >= before
            kept = retained(rows, tokens, packed=packed)
            assert retained(rows, tokens, profile(ratio=learned), packed=packed) >= kept


def test_full_sharing_is_strictly_cheaper_under_a_profile_without_sharing() -> None:
    """So that splitting can use sharing to rescue a batch. By logical tokens both layouts would cost the same."""
    alone = profile(ratio=1)
    assert required(2000, 8000, alone) < required(8000, 8000, alone)
    assert required(2000, 8000, alone, packed=False) == required(8000, 8000, alone, packed=False)


def test_learned_is_the_largest_of_each_number_by_itself() -> None:
    book = ProfileBook()
    key = MemorySignature(mix=(SINGLE,), grad_modes=(True,), adapters=("",), recompute="full/uniform/1")
    book.observe(key, shape(10, 60, outputs=40), peak_bytes=7040, live_bytes=140)
    assert book.find(key) == Profile(
        peak_rate=Fraction(700), retained_rate=Fraction(10), packed_rows=10, ratio=Fraction(6)
    )
    book.observe(key, shape(30, 30, outputs=50), peak_bytes=3050, live_bytes=1000)
    found = book.find(key)
    assert found == Profile(peak_rate=Fraction(700), retained_rate=Fraction(950, 30), packed_rows=30, ratio=Fraction(6))
    book.observe(key, shape(7, 7), peak_bytes=1, live_bytes=None)
    assert book.find(key) == found
    assert ProfileBook.from_json(book.to_json()).find(key) == found
    assert len(book) == 1


def test_an_observation_below_its_outputs_or_without_rows_teaches_nothing_below_zero() -> None:
    book = ProfileBook()
    key = MemorySignature(mix=(SINGLE,), grad_modes=(True,), adapters=("",), recompute="none")
    book.observe(key, shape(0, 0, outputs=40), peak_bytes=40, live_bytes=40)
    assert book.find(key) is None
    book.observe(key, shape(1, 1, outputs=40), peak_bytes=10, live_bytes=10)
    found = book.find(key)
    assert found is not None
    assert (found.peak_rate, found.retained_rate) == (0, 0)


def test_a_short_batch_reuses_the_profile_of_longer_requests_at_the_extrapolated_price() -> None:
    """Nothing is there before a 64-token request calibrates it; then 63 tokens, and a mix of both."""

    def signature(*lengths: int) -> MemorySignature:
        return MemorySignature.of(
            [(SINGLE, length) for length in lengths], grad_modes=[True], adapters=[""], recompute="full/uniform/1"
        )

    def packed_at(rows: int, tokens: int, key: MemorySignature) -> ForwardShape:
        return shape(rows, tokens, packed=packed_priced(key, True), outputs=4 * tokens)

    book = ProfileBook()
    assert book.find(signature(63)) is None
    calibrated = signature(64)
    book.observe(calibrated, packed_at(64, 64, calibrated), peak_bytes=64 * 5000 + 4 * 64, live_bytes=64 * 900 + 4 * 64)
    for lengths, rows in (((63,), 63), ((63, 64), 64), ((63, 63, 64, 65), 66)):
        key, tokens = signature(*lengths), sum(lengths)
        one = packed_at(rows, tokens, key)
        assert not one.packed
        price = price_forward(MODEL, one, book.find(key))
        # The profile's ratio is 1, so rows are charged for all tokens; 4 bytes per label.
        assert price.required_bytes == floor(Fraction(11, 10) * (4 * tokens + 5000 * tokens))
    long = packed_at(65, 128, signature(64, 64))
    assert long.packed
    assert price_forward(MODEL, long, book.find(calibrated)).required_bytes == floor(
        Fraction(11, 10) * (4 * 128 + 5000 * 65 + 6144 * 128)
    )


def test_terms_sum_to_required_and_name_what_is_charged() -> None:
    hybrid = replace(MODEL, state_bytes=777)
    price = price_forward(hybrid, shape(333, 1000, outputs=11, segments=3), profile(rate=Fraction(10_000, 3)))
    assert [term.name for term in price.terms] == [
        "outputs", "learned rows", "head and caller per token", "recurrent states", "margin of the profile",
    ]  # fmt: skip
    assert sum(term.num_bytes for term in price.terms) == price.required_bytes
    cold = price_forward(MODEL, shape(0, 0), None)
    assert cold.required_bytes == 0
