"""The CUDA meter's arithmetic, on injected counters."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from trainer_rank.errors import MeterError
from trainer_rank.meters.cuda import CudaMeter
from trainer_rank.units import GIB


@dataclass
class FakeCounters:
    """One device of 141 GiB; bytes outside torch's allocator are what is neither free nor reserved."""

    allocated: int = 0
    reserved: int = 0
    free: int = 141 * GIB
    total: int = 141 * GIB
    freed_by_release: int | None = None
    releases: int = 0
    caps: list[int] = field(default_factory=list)

    def total_bytes(self) -> int:
        return self.total

    def free_bytes(self) -> int:
        return self.free

    def allocated_bytes(self) -> int:
        return self.allocated

    def reserved_bytes(self) -> int:
        return self.reserved

    def peak_allocated_bytes(self) -> int:
        return self.allocated

    def peak_reserved_bytes(self) -> int:
        return self.reserved

    def reset_peak(self) -> None:
        pass

    def release_cached(self) -> None:
        cached = self.reserved - self.allocated
        freed = cached if self.freed_by_release is None else self.freed_by_release
        self.reserved -= freed
        self.free += freed
        self.releases += 1

    def set_cap(self, cap_bytes: int) -> None:
        self.caps.append(cap_bytes)


def meter_on(counters: FakeCounters, memory_budget: int | None = None, reserve_fraction: float = 0.0) -> CudaMeter:
    return CudaMeter("cuda:0", memory_budget, reserve_fraction, waste_fraction=0.0, counters=counters)


def fragmented(freed_by_release: int | None = None) -> tuple[CudaMeter, FakeCounters]:
    """A meter opened on an empty device that then holds 40 GiB live, 130 GiB reserved and 8 GiB free."""
    counters = FakeCounters()
    meter = meter_on(counters)
    counters.allocated, counters.reserved, counters.free = 40 * GIB, 130 * GIB, 8 * GIB
    counters.freed_by_release = freed_by_release
    return meter, counters


def test_free_plus_cached_is_never_offered() -> None:
    """With 8 GiB free and 90 GiB cached, 8 GiB are available until the cache is really released."""
    meter, counters = fragmented()
    assert meter.read().available_bytes == 8 * GIB
    assert counters.releases == 0


def test_a_need_above_free_releases_once_and_reads_again() -> None:
    """A need of 30 GiB releases the cache once; what the driver then says is what is offered."""
    meter, counters = fragmented()
    assert meter.prepare(needed_bytes=30 * GIB).available_bytes == 98 * GIB
    assert counters.releases == 1


def test_a_release_that_frees_little_offers_little() -> None:
    """Cached blocks pinned by live neighbours stay reserved: 3 GiB given back make 11 GiB, not 98."""
    meter, counters = fragmented(freed_by_release=3 * GIB)
    assert meter.prepare(needed_bytes=30 * GIB).available_bytes == 11 * GIB
    assert counters.releases == 1


def test_a_need_that_is_free_already_releases_nothing() -> None:
    """The cache is kept when it is not in the way."""
    meter, counters = fragmented()
    assert meter.prepare(needed_bytes=8 * GIB).available_bytes == 8 * GIB
    assert counters.releases == 0


def test_the_budget_and_the_reserve_come_off() -> None:
    """Available is the smaller of free and budget less resident, less the reserve."""
    counters = FakeCounters(allocated=10 * GIB, reserved=10 * GIB, free=120 * GIB)
    reading = meter_on(counters, memory_budget=100 * GIB, reserve_fraction=0.25).read()
    assert reading.resident_bytes == 21 * GIB
    assert reading.available_bytes == (100 - 21 - 25) * GIB


def test_the_cap_leaves_room_for_what_torch_does_not_see() -> None:
    """The allocator may reserve the budget less the reserve less the bytes outside it; closing lifts that."""
    counters = FakeCounters(allocated=10 * GIB, reserved=10 * GIB, free=120 * GIB)
    meter = meter_on(counters, memory_budget=100 * GIB, reserve_fraction=0.25)
    assert counters.caps == [(100 - 25 - 11) * GIB]
    meter.close()
    meter.close()
    assert counters.caps[1:] == [141 * GIB]


def test_without_a_budget_no_cap_is_set() -> None:
    """The whole device is the driver's to limit."""
    counters = FakeCounters()
    meter_on(counters).close()
    assert counters.caps == []


def test_a_budget_above_the_device_is_refused() -> None:
    """The message names the field, what was got and what the device has."""
    with pytest.raises(ValueError, match=r"memory_budget must not exceed .* got 142.00 GiB .* 141.00 GiB"):
        meter_on(FakeCounters(), memory_budget=142 * GIB)


@pytest.mark.parametrize("fraction", [-0.1, 1.0])
def test_a_reserve_fraction_outside_its_range_is_refused(fraction: float) -> None:
    """The message names the field and the range."""
    with pytest.raises(ValueError, match=r"reserve_fraction must be in \[0, 1\)"):
        meter_on(FakeCounters(), reserve_fraction=fraction)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_device_that_is_not_there_is_named() -> None:
    """Asking for CUDA where torch sees none says what to use instead."""
    with pytest.raises(MeterError, match="torch sees no CUDA device; use device 'cpu'"):
        CudaMeter("cuda:0")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_real_device_counts_a_known_tensor() -> None:
    """Live bytes rise by a tensor's own size, and the cap raises torch's error."""
    with CudaMeter("cuda", "4GiB") as meter:
        before = meter.read().allocated_bytes
        tensor = torch.ones(1 << 20, device="cuda")
        assert meter.read().allocated_bytes - before == tensor.nbytes
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(8 * GIB, dtype=torch.uint8, device="cuda")
