"""Bounds of the ``profile`` pricer against every kind of layout of random batches."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.strategies import Rows, as_arrays, rows_and_decisions
from trainer_rank.memory.profile import (
    ForwardShape,
    Profile,
    ProfileModel,
    price_forward,
    required_at_least,
    retained_at_least,
    width_probe,
)
from trainer_rank.prefix import Layout, build_tree, pack

MODEL = ProfileModel(num_layers=8, hidden_size=16, vocabulary_size=50, element_size=2, state_bytes=5000)

profiles = st.none() | st.builds(
    Profile,
    peak_rate=st.fractions(0, 200_000, max_denominator=1000),
    retained_rate=st.none() | st.fractions(0, 200_000, max_denominator=1000),
    packed_rows=st.integers(1, 12),
    ratio=st.fractions(1, 4, max_denominator=10),
)


def shape_of(rows: Rows, layout: Layout, *, packed: bool) -> ForwardShape:
    batch = pack(build_tree(as_arrays(rows)), layout)
    return ForwardShape(
        packed_rows=batch.packed_rows,
        logical_tokens=batch.logical_tokens,
        output_bytes=4 * batch.logical_tokens,
        segments=batch.num_segments,
        packed=packed,
    )


@settings(max_examples=300, deadline=None)
@given(drawn=rows_and_decisions(), known=profiles, packed=st.booleans(), depth=st.integers(0, 4))
def test_full_sharing_bounds_every_layout_and_a_width_probe_every_segment(
    drawn: tuple[Rows, tuple[bool, ...]], known: Profile | None, packed: bool, depth: int
) -> None:
    rows, decisions = drawn
    full = shape_of(rows, Layout.full_sharing(), packed=packed)
    required = required_at_least(MODEL, full, known)
    retained = retained_at_least(MODEL, full, known)
    for layout in (
        Layout.full_sharing(), Layout.no_sharing(), Layout.uniform_depth(depth), Layout.mixed(decisions),
    ):  # fmt: skip
        shape = shape_of(rows, layout, packed=packed)
        price = price_forward(MODEL, shape, known)
        assert required.num_bytes <= price.required_bytes
        assert retained.num_bytes <= price.retained_bytes
        assert price.required_bytes <= width_probe(MODEL, shape, len(rows), known).num_bytes


def test_the_retained_price_of_full_sharing_is_no_bound() -> None:
    """Full sharing lies outside the window of the ratio, where retained is required; less sharing lies inside.

    1,600 tokens on 50 rows share 32-fold, the profile saw 2; on 400 rows they share 4-fold.
    """
    known = Profile(peak_rate=Fraction(100_000), retained_rate=Fraction(1000), packed_rows=1000, ratio=Fraction(2))
    full = ForwardShape(packed_rows=50, logical_tokens=1600, packed=True)
    less = ForwardShape(packed_rows=400, logical_tokens=1600, packed=True)
    assert not known.trusts(full)
    assert known.trusts(less)
    priced_full, priced_less = (price_forward(MODEL, shape, known) for shape in (full, less))
    assert priced_less.retained_bytes < priced_full.retained_bytes
    assert retained_at_least(MODEL, full, known).num_bytes <= priced_less.retained_bytes
    # 1.10 * (1,000 * 50 + 6,144 * 1,600), and 1.10 * (1,000 * 400 + 6,144 * 1,600)
    assert retained_at_least(MODEL, full, known).num_bytes == 10_868_440
    assert priced_less.retained_bytes == 11_253_440
