"""What Linux says, read from files a test wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_rank.errors import MeterError
from trainer_rank.meters.host_memory import HostMemory
from trainer_rank.units import GIB, MIB


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 8 GiB available and no control groups."""
    write(tmp_path / "proc/meminfo", f"MemTotal: 1 kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    write(tmp_path / "proc/self/status", "Name:\tx\nVmSize:\t 10 kB\nVmHWM:\t 300 kB\nVmData:\t 5 kB\nThreads:\t2\n")
    write(tmp_path / "proc/self/statm", "100 25 3 1 0 2 0\n")
    write(tmp_path / "proc/self/cgroup", "")
    return tmp_path


def test_available_memory_is_the_limit_without_others(root: Path) -> None:
    """With no control group and no process limit the machine's available memory decides."""
    assert HostMemory(root=root).growth_bytes() == 8 * GIB


def test_the_second_version_of_control_groups_limits(root: Path) -> None:
    """Inactive file pages count as free, and the tightest group on the way up decides."""
    write(root / "proc/self/cgroup", "0::/pod/box\n")
    for name, limit, used in (("pod/box", "max", 0), ("pod", str(3 * GIB), 2 * GIB)):
        group = root / "sys/fs/cgroup" / name
        write(group / "memory.max", limit)
        write(group / "memory.current", str(used))
        write(group / "memory.stat", f"anon 1\ninactive_file {256 * MIB}\n")
    assert HostMemory(root=root).growth_bytes() == GIB + 256 * MIB


def test_the_first_version_of_control_groups_limits(root: Path) -> None:
    """The path in a container does not exist below the mount; the mount itself is then the group."""
    write(root / "proc/self/cgroup", "4:cpu,memory:/docker/elsewhere\n3:pids:/x\n0::/\n")
    group = root / "sys/fs/cgroup/memory"
    write(group / "memory.limit_in_bytes", str(2 * GIB))
    write(group / "memory.usage_in_bytes", str(GIB))
    write(group / "memory.stat", "total_inactive_file 0\n")
    assert HostMemory(root=root).growth_bytes() == GIB


def test_a_group_over_its_limit_gives_nothing(root: Path) -> None:
    """Growth is never negative."""
    write(root / "proc/self/cgroup", "0::/\n")
    group = root / "sys/fs/cgroup"
    write(group / "memory.max", "1000")
    write(group / "memory.current", "5000")
    write(group / "memory.stat", "inactive_file 0\n")
    assert HostMemory(root=root).growth_bytes() == 0


def test_resident_and_peak_come_from_proc(root: Path) -> None:
    """VmHWM is in kB and the resident set in pages."""
    host = HostMemory(root=root)
    assert host.peak_resident_bytes() == 300 * 1024
    assert host.resident_bytes() % 25 == 0
    assert host.resident_bytes() > 0


def test_a_peak_that_cannot_be_reset_is_reported(root: Path) -> None:
    """False instead of an error: the caller then says since when the peak counts."""
    (root / "proc/self/clear_refs").mkdir()
    assert not HostMemory(root=root).reset_peak_resident()


def test_a_machine_without_proc_is_refused(tmp_path: Path) -> None:
    """The message says what is missing and what to do."""
    with pytest.raises(MeterError, match="needs Linux's /proc"):
        HostMemory(root=tmp_path).resident_bytes()
