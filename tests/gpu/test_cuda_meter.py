"""The CUDA meter on a real device."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.gpu.device import CUDA, needs_cuda
from trainer_rank.meters.cuda import CudaMeter
from trainer_rank.units import GIB, MIB

pytestmark = needs_cuda

ROOM = 2 * GIB


@pytest.fixture
def meter() -> Iterator[CudaMeter]:
    """A meter with 2 GiB left in its budget, its device's cache empty."""
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(CUDA)
    with CudaMeter("cuda:0", total - free + ROOM, 0.0) as opened:
        yield opened


def block(num_bytes: int) -> torch.Tensor:
    """Return a tensor of this many bytes on the device."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=CUDA)


def test_the_cap_raises_torchs_own_error(meter: CudaMeter) -> None:
    """An allocation beyond the budget fails though the device has room; one within it does not."""
    block(ROOM // 2)
    with pytest.raises(torch.OutOfMemoryError):
        block(2 * ROOM)


def test_cached_blocks_are_given_back_before_the_cap_raises(meter: CudaMeter) -> None:
    """What was freed under the cap is there for a block of another size."""
    del_me = [block(ROOM // 8) for _ in range(7)]
    del del_me
    assert block(ROOM * 7 // 8).nbytes == ROOM * 7 // 8


def test_live_bytes_are_not_available(meter: CudaMeter) -> None:
    """A live gibibyte leaves one of two, and the counters say so."""
    before = meter.read()
    held = block(GIB)
    now = meter.read()
    assert now.allocated_bytes - before.allocated_bytes == held.nbytes
    assert before.available_bytes - now.available_bytes == pytest.approx(GIB, abs=32 * MIB)


def test_cached_bytes_are_available_only_after_release(meter: CudaMeter) -> None:
    """Freeing alone gives nothing back; preparing for a need beyond what is free does."""
    before = meter.read().available_bytes
    held = block(GIB)
    del held
    assert meter.read().available_bytes == pytest.approx(before - GIB, abs=32 * MIB)
    assert meter.prepare(ROOM).available_bytes == pytest.approx(before, abs=32 * MIB)


def test_peaks_start_again_from_what_is_live(meter: CudaMeter) -> None:
    """After a reset the peak is the live bytes, then the largest since."""
    block(GIB)
    meter.reset_peak()
    live = meter.read().allocated_bytes
    block(256 * MIB)
    assert meter.read().peak_allocated_bytes - live == 256 * MIB


def test_closing_lifts_the_cap(meter: CudaMeter) -> None:
    """Once closed the whole device is there again."""
    meter.close()
    assert block(2 * ROOM).nbytes == 2 * ROOM
