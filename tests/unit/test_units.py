"""Bytes as people write and read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_rank.units import GIB, KIB, MIB, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("0", 0),
        ("4096", 4096),
        ("512B", 512),
        ("2GiB", 2 * GIB),
        ("2 gib", 2 * GIB),
        (" 1.5 GB ", 1_500_000_000),
        ("0.5KiB", 512),
        ("3MB", 3_000_000),
        ("1TiB", 1024 * GIB),
        (7, 7),
    ],
)
def test_numbers_with_and_without_suffixes_are_read(text: int | str, wanted: int) -> None:
    """Binary suffixes are powers of 1024, decimal ones of 1000, in any case and spacing."""
    assert parse_bytes(text) == wanted


@pytest.mark.parametrize("value", ["", "GiB", "-1", "2 apples", "1e9", "0x10", -1, 1.5, True, None])
def test_anything_else_is_refused_with_the_field_and_the_value(value: object) -> None:
    """The message names what was being set and what was given."""
    with pytest.raises(ValueError, match="memory_budget") as caught:
        parse_bytes(value, field="memory_budget")  # type: ignore[arg-type]
    assert str(value) in str(caught.value)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(0, "0 B"), (1023, "1023 B"), (KIB, "1.0 KiB"), (3 * MIB // 2, "1.5 MiB"), (GIB, "1.00 GiB"), (-MIB, "-1.0 MiB")],
)
def test_bytes_are_printed_in_binary_units(value: int, wanted: str) -> None:
    """One decimal below a GiB, two above."""
    assert format_bytes(value) == wanted


@given(st.integers(0, 2**50))
def test_what_is_printed_reads_back_to_within_its_rounding(value: int) -> None:
    """``parse_bytes(format_bytes(x))`` is x to the digits shown."""
    assert abs(parse_bytes(format_bytes(value)) - value) <= max(1, value * 0.051)
