"""The simulated meter plays a caching allocator."""

from __future__ import annotations

import pytest

from trainer_rank.errors import MeterError
from trainer_rank.meters import SimulatedMeter, SimulatedOutOfMemoryError


def test_freed_bytes_stay_reserved_until_released() -> None:
    """Allocated, reserved and their peaks move as in a caching allocator."""
    meter = SimulatedMeter(100, reserve_bytes=10, outside_bytes=5)
    meter.allocate(40)
    meter.free(30)
    reading = meter.read()
    assert (reading.allocated_bytes, reading.reserved_bytes, reading.resident_bytes) == (10, 40, 45)
    assert (reading.peak_allocated_bytes, reading.peak_reserved_bytes) == (40, 40)
    assert reading.available_bytes == 100 - 10 - 45
    meter.release_cached()
    meter.reset_peak()
    reading = meter.read()
    assert (reading.reserved_bytes, reading.peak_reserved_bytes, reading.available_bytes) == (10, 10, 75)


def test_allocation_past_the_budget_raises_and_leaves_live_bytes_alone() -> None:
    """The error carries the bytes wanted, and a smaller allocation still works."""
    meter = SimulatedMeter("100B")
    meter.allocate(60)
    with pytest.raises(SimulatedOutOfMemoryError, match="tried to allocate 41 bytes") as caught:
        meter.allocate(41)
    assert caught.value.wanted_bytes == 41
    meter.allocate(40)
    assert meter.read().allocated_bytes == 100


def test_prepare_releases_once_and_reads_again() -> None:
    """A release that frees less than hoped is seen in the reading that follows it."""

    def another_process_takes_it(meter: SimulatedMeter) -> None:
        meter.outside_bytes += 25

    meter = SimulatedMeter(100, on_release=another_process_takes_it)
    meter.allocate(60)
    meter.free(50)
    assert meter.prepare(needed_bytes=40).available_bytes == 40
    assert meter.releases == 0
    assert meter.prepare(needed_bytes=80).available_bytes == 100 - 10 - 25
    assert meter.releases == 1


def test_a_closed_meter_says_so() -> None:
    """Reading after close is an error, closing twice is not."""
    with SimulatedMeter(1) as meter:
        pass
    meter.close()
    with pytest.raises(MeterError, match="closed"):
        meter.read()
