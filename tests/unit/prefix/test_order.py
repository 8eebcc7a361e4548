"""Canonical order."""

from __future__ import annotations

import numpy as np
import pytest

from trainer_rank.errors import RequestError
from trainer_rank.prefix.order import canonical_order, common_prefix


def row(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


def test_a_row_sorts_before_its_extensions() -> None:
    """A prefix of a row comes first."""
    assert canonical_order([row(1, 2, 3), row(1), row(1, 2)]).order.tolist() == [1, 2, 0]


def test_numeric_order_holds_across_byte_boundaries() -> None:
    """255 sorts before 256, and 2**32 after both."""
    assert canonical_order([row(2**32), row(256), row(255)]).order.tolist() == [2, 1, 0]


def test_lcp_of_duplicates_is_their_length() -> None:
    """A duplicate shares all of the row before it."""
    assert canonical_order([row(4, 5), row(4, 5), row(4, 6)]).lcp.tolist() == [0, 2, 1]


def test_order_of_no_rows_is_empty() -> None:
    """No rows are fine."""
    assert canonical_order([]).order.shape == (0,)


def test_strided_rows_are_read_in_place() -> None:
    """A view with a stride sorts as its copy does."""
    table = np.arange(12, dtype=np.int64).reshape(6, 2)
    assert canonical_order([table[:, 1], table[:, 0]]).order.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (row(), row(1), 0),
        (row(1, 2), row(1, 2, 3), 2),
        (row(1, 2), row(1, 3), 1),
        (row(2), row(1), 0),
        (row(1), row(1), 1),
    ],
)
def test_common_prefix_counts_leading_equal_tokens(a: np.ndarray, b: np.ndarray, expected: int) -> None:
    """Only tokens before the first difference count."""
    assert common_prefix(a, b) == expected


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (row(), "at least one token, got 0"),
        (row(3, -100), "must be >= 0, got -100"),
        (np.array([1, 2], dtype=np.int32), "got int32 array"),
        (np.array([[1]], dtype=np.int64), r"got int64 array \(1, 1\)"),
        ([1, 2], "got list"),
    ],
)
def test_a_malformed_row_is_named_with_its_index_and_value(bad: np.ndarray, said: str) -> None:
    """The error names the request, the field and what was got."""
    with pytest.raises(RequestError, match=f"request 1: tokens .*{said}") as caught:
        canonical_order([row(1), bad])
    assert (caught.value.field, caught.value.index) == ("tokens", 1)
