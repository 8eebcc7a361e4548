"""The meter without a compiler."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.meters.models import Blocks, step
from trainer_rank.errors import MeterError
from trainer_rank.meters.counting_lib import load
from trainer_rank.meters.host_memory import HostMemory
from trainer_rank.meters.tracking import TrackingCpuMeter
from trainer_rank.units import MIB


@pytest.fixture
def meter() -> Iterator[TrackingCpuMeter]:
    gc.collect()
    with TrackingCpuMeter(HostMemory().resident_bytes() + 512 * MIB, reserve_bytes=32 * MIB) as meter:
        assert isinstance(meter, TrackingCpuMeter)
        yield meter


def test_live_and_peak_follow_known_tensors(meter: TrackingCpuMeter) -> None:
    """Views count once, and a peak stays after its tensor is gone until it is reset."""
    tensor = torch.ones(MIB)
    view = tensor.view(2, -1)
    assert meter.read().allocated_bytes == tensor.nbytes
    del tensor
    assert meter.read().allocated_bytes == view.nbytes
    del view
    assert meter.read().allocated_bytes == 0
    assert meter.read().peak_allocated_bytes == 4 * MIB
    meter.reset_peak()
    assert meter.read().peak_allocated_bytes == 0


def test_tensors_older_than_the_meter_are_not_counted() -> None:
    """Neither they nor their views are allocations."""
    old = torch.ones(MIB)
    with TrackingCpuMeter("4GiB") as meter:
        view = old.view(-1)
        old.add_(1)
        assert meter.read().allocated_bytes == 0
        assert view.numel() == MIB


def test_a_resized_storage_is_counted_at_its_new_size(meter: TrackingCpuMeter) -> None:
    """The next operator that returns it corrects the count."""
    tensor = torch.empty(0)
    tensor.resize_(MIB)
    assert meter.read().allocated_bytes == 4 * MIB


def test_the_cap_raises_torch_out_of_memory_and_memory_stays_usable(meter: TrackingCpuMeter) -> None:
    """The refused tensor is gone and a smaller one works."""
    offered = meter.prepare().available_bytes
    with pytest.raises(torch.OutOfMemoryError, match=r"aten\.empty.* brings live tensors to"):
        torch.empty(offered + 33 * MIB, dtype=torch.uint8)
    assert meter.read().allocated_bytes == 0
    assert torch.empty(offered, dtype=torch.uint8).numel() == offered


def test_a_step_peaks_as_the_allocator_says() -> None:
    """Operators' outputs are all that this step allocates, so both mechanisms agree."""
    library = load()
    library.install()
    model = Blocks()
    step(model)
    gc.collect()
    base = library.live_bytes()
    library.reset_peak()
    step(model)
    counted = library.peak_bytes() - base
    with TrackingCpuMeter("8GiB") as meter:
        step(model)
        tracked = meter.read()
    assert tracked.allocated_bytes == 0
    assert abs(tracked.peak_allocated_bytes - counted) <= counted // 1000


def test_failed_steps_leave_nothing_behind(meter: TrackingCpuMeter) -> None:
    """Twenty out-of-memory errors at random caps, and live bytes are back each time."""
    model = Blocks()
    step(model)
    gc.collect()
    base = meter.read().allocated_bytes
    meter.reset_peak()
    step(model)
    peak = meter.read().peak_allocated_bytes - base
    rng = random.Random(0)
    for _ in range(20):
        meter._tracker.cap_bytes = base + int(peak * rng.uniform(0.05, 0.99))
        with pytest.raises(torch.OutOfMemoryError):
            step(model)
        if meter.read().allocated_bytes != base:  # a collection is slow; only a reference cycle needs one
            gc.collect()
        assert meter.read().allocated_bytes == base
    meter.prepare()
    step(model)


def test_closing_out_of_order_is_refused(meter: TrackingCpuMeter) -> None:
    """A mode entered later must be left first."""
    with TorchDispatchMode(), pytest.raises(MeterError, match="leave it first"):
        meter.close()


def test_a_closed_meter_counts_no_more(meter: TrackingCpuMeter) -> None:
    """Closing twice is fine, reading is an error."""
    meter.close()
    meter.close()
    with pytest.raises(MeterError, match="closed"):
        meter.read()
