"""The reading, and what importing the package costs."""

from __future__ import annotations

import pytest

from tests.unit.meters.isolation import run_python
from trainer_rank.meters import Reading


def reading(*, resident: int = 0, budget: int = 100, reserve: int = 10, available: int = 0) -> Reading:
    return Reading(
        allocated_bytes=0,
        reserved_bytes=0,
        resident_bytes=resident,
        peak_allocated_bytes=0,
        peak_reserved_bytes=0,
        peak_resident_bytes=None,
        peak_resident_since_reset=False,
        budget_bytes=budget,
        reserve_bytes=reserve,
        available_bytes=available,
    )


def test_importing_the_package_imports_no_torch() -> None:
    """A report or a test with a simulated meter runs where torch is not installed."""
    assert run_python("import sys, trainer_rank.meters; print('torch' in sys.modules)") == "False"


@pytest.mark.parametrize(("resident", "over"), [(80, 0), (90, 0), (91, 1), (250, 160)])
def test_over_budget_is_what_is_missing_for_the_reserve(resident: int, over: int) -> None:
    """A process that holds more than its budget less the reserve says by how much."""
    assert reading(resident=resident).over_budget_bytes == over


def test_a_reading_never_offers_a_negative_number() -> None:
    """A negative offer is the meter's own mistake, not a caller's."""
    with pytest.raises(AssertionError, match="available_bytes is negative"):
        reading(available=-1)
