"""The CPU meter: budget, resident set, cap, and several meters in one process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.unit.meters.isolation import run_python
from trainer_rank.errors import MeterError
from trainer_rank.meters.cpu import CpuMeter
from trainer_rank.meters.host_memory import HostMemory
from trainer_rank.units import GIB, MIB


@pytest.fixture
def meter() -> Iterator[CpuMeter]:
    gc.collect()
    with CpuMeter(HostMemory().resident_bytes() + 512 * MIB, reserve_bytes=32 * MIB) as meter:
        assert isinstance(meter, CpuMeter)
        yield meter


def test_a_known_tensor_is_counted(meter: CpuMeter) -> None:
    """Allocated bytes rise by the tensor's size; reserved and resident bytes cover it."""
    before = meter.read()
    tensor = torch.ones(5 * MIB)
    after = meter.read()
    assert after.allocated_bytes - before.allocated_bytes == tensor.nbytes
    assert after.reserved_bytes >= after.allocated_bytes
    assert after.resident_bytes - before.resident_bytes >= tensor.nbytes - MIB
    del tensor
    assert meter.read().allocated_bytes == before.allocated_bytes
    assert meter.read().peak_allocated_bytes >= after.allocated_bytes


def test_what_is_available_can_be_had_and_no_more(meter: CpuMeter) -> None:
    """The offer fits the cap; the offer and the reserve together do not."""
    offered = meter.prepare().available_bytes
    assert offered > 100 * MIB
    tensor = torch.empty(offered, dtype=torch.uint8)
    assert tensor.numel() == offered
    del tensor
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(offered + 33 * MIB, dtype=torch.uint8)


def test_live_bytes_come_off_what_is_available(meter: CpuMeter) -> None:
    """Holding 100 MiB lowers the offer by 100 MiB, whether its pages were touched or not."""
    before = meter.prepare().available_bytes
    touched = torch.ones(50 * MIB, dtype=torch.uint8)
    untouched = torch.empty(50 * MIB, dtype=torch.uint8)
    after = meter.prepare().available_bytes
    assert touched.numel() + untouched.numel() == 100 * MIB
    assert abs(before - after - 100 * MIB) < 4 * MIB


def test_cached_bytes_do_not_lower_what_is_available(meter: CpuMeter) -> None:
    """A freed block is cached, and offered again."""
    before = meter.prepare().available_bytes
    tensor = torch.ones(20 * MIB, dtype=torch.uint8)
    del tensor
    reading = meter.prepare()
    assert reading.reserved_bytes - reading.allocated_bytes >= 16 * MIB
    assert abs(before - reading.available_bytes) < 4 * MIB


def test_a_budget_below_what_is_resident_offers_nothing_but_small_tensors_still_work() -> None:
    """The meter exposes the numbers; refusing is its caller's."""
    with CpuMeter("16MiB") as meter:
        reading = meter.prepare()
        assert reading.available_bytes == 0
        assert reading.over_budget_bytes > 0
        assert torch.ones(10).sum().item() == 10
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(20 * MIB, dtype=torch.uint8)


def test_the_last_prepared_meter_holds_the_cap() -> None:
    """One allocator, one cap: a meter arms its own budget, and only its closing lifts it."""
    resident = HostMemory().resident_bytes()
    wide = CpuMeter(resident + GIB)
    narrow = CpuMeter(resident + 128 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(256 * MIB, dtype=torch.uint8)
    wide.close()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(256 * MIB, dtype=torch.uint8)
    narrow.close()
    assert torch.empty(256 * MIB, dtype=torch.uint8).numel() == 256 * MIB


def test_a_closed_meter_says_so(meter: CpuMeter) -> None:
    """Reading after close is an error, closing twice is not, and tensors outlive the meter."""
    tensor = torch.ones(MIB)
    meter.close()
    meter.close()
    assert tensor.sum().item() == MIB
    del tensor
    with pytest.raises(MeterError, match="closed"):
        meter.read()


def test_a_peak_that_cannot_be_reset_warns_once_and_is_marked(tmp_path: Path) -> None:
    """The reading says that its resident peak is the process's own."""
    (tmp_path / "proc/self").mkdir(parents=True)
    for name in ("meminfo", "self/status", "self/statm", "self/cgroup"):
        (tmp_path / "proc" / name).write_text(Path("/proc", name).read_text())
    (tmp_path / "proc/self/clear_refs").mkdir()
    with pytest.warns(RuntimeWarning, match="peak_resident_bytes is the peak since the process started"):
        meter = CpuMeter("4GiB", host=HostMemory(root=tmp_path))
    meter.reset_peak()
    assert not meter.read().peak_resident_since_reset
    meter.close()


def test_the_cache_is_released_where_the_kernel_is_the_limit(tmp_path: Path) -> None:
    """With little memory left on the machine, cached bytes are credited only after they were given back."""
    (tmp_path / "proc/self").mkdir(parents=True)
    for name in ("self/status", "self/statm", "self/cgroup"):
        (tmp_path / "proc" / name).write_text(Path("/proc", name).read_text())
    (tmp_path / "proc/self/clear_refs").write_text("")
    (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {64 * 1024} kB\n")
    with CpuMeter("64GiB", reserve_bytes=0, host=HostMemory(root=tmp_path)) as meter:
        tensor = torch.ones(40 * MIB, dtype=torch.uint8)
        del tensor
        kept = meter.prepare(needed_bytes=60 * MIB)
        assert kept.available_bytes == 64 * MIB
        assert kept.reserved_bytes - kept.allocated_bytes >= 40 * MIB
        released = meter.prepare(needed_bytes=80 * MIB)
        assert released.available_bytes == 64 * MIB
        assert released.reserved_bytes - released.allocated_bytes < 1 * MIB


def test_a_malformed_budget_names_its_field() -> None:
    """Nothing is installed for a budget that cannot be read."""
    with pytest.raises(ValueError, match="memory_budget must be a number of bytes"):
        CpuMeter("plenty")
    with pytest.raises(ValueError, match="cache_limit_bytes must not be negative"):
        CpuMeter("1GiB", cache_limit_bytes=-1)


def test_the_resident_set_follows_the_allocator() -> None:
    """1 GiB in 200 mixed blocks is resident while live, beside the cache; afterwards only the cache stays."""
    out = run_python(
        """
        import random, torch
        from trainer_rank.meters.cpu import CpuMeter
        MIB = 2**20
        meter = CpuMeter("8GiB", cache_limit_bytes=64 * MIB)
        begin = meter.read()
        rng = random.Random(0)
        cuts = sorted(rng.sample(range(1, 1024 * 1024), 199))
        sizes = [1024 * (b - a) for a, b in zip([0, *cuts], [*cuts, 1024 * 1024])]
        rng.shuffle(sizes)
        blocks = [torch.ones(size, dtype=torch.uint8) for size in sizes]
        full = meter.read()
        rng.shuffle(blocks)
        while blocks:
            blocks.pop()
        end = meter.read()
        assert full.allocated_bytes - begin.allocated_bytes == 1024 * MIB
        assert 1024 * MIB - 8 * MIB <= full.resident_bytes - begin.resident_bytes <= (1024 + 64 + 16) * MIB
        assert end.resident_bytes - begin.resident_bytes <= (64 + 64) * MIB, end
        assert end.peak_resident_bytes >= full.resident_bytes - MIB  # the kernel sums its counters loosely
        print("ok")
        """
    )
    assert out == "ok"


def test_older_tensors_and_late_frees_survive_in_a_fresh_process() -> None:
    """Tensors from before opening and after closing are read and freed, at exit too; a fork still allocates."""
    out = run_python(
        """
        import os, torch
        old = torch.arange(1_000_000)
        from trainer_rank.meters.cpu import CpuMeter
        meter = CpuMeter("4GiB")
        new = torch.arange(1_000_000)
        child = os.fork()
        if child == 0:
            assert torch.empty(8_000_000).numel() == 8_000_000  # no OpenMP: it does not survive a fork
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        meter.close()
        assert torch.equal(old, new)
        del old
        print(int(new.sum()))
        """
    )
    assert out == str(sum(range(1_000_000)))
