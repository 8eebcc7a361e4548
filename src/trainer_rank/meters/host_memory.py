"""What Linux says about this process's memory: resident set, its peak, and how far it may still grow. Imports no torch.

Numbers come from ``/proc`` and the cgroup file systems; ``root`` lets a test put its own files there.
"""

from __future__ import annotations

import ctypes
import resource
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainer_rank.errors import MeterError
from trainer_rank.units import KIB, MIB

_PAGE_BYTES: Final = resource.getpagesize()

# glibc's names for mallopt's parameters (malloc.h).
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3

# Setting either value also stops glibc from raising the mmap threshold to 32 MiB by itself, which is what makes a
# default process keep many times its live bytes.
MMAP_THRESHOLD_BYTES: Final = 64 * KIB
TRIM_THRESHOLD_BYTES: Final = 1 * MIB


def tune_malloc() -> bool:
    """Make the C library's heap give freed memory back; return False where it cannot be tuned (not glibc).

    Lasts for the life of the process: glibc has no way back to its moving threshold.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    mapped = mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
    trimmed = mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)
    return bool(mapped) and bool(trimmed)


def reset_peak_or_warn(host: HostMemory, *, was_reset: bool) -> bool:
    """Start the peak resident set again; return whether the kernel did, and warn the first time that it does not."""
    resets = host.reset_peak_resident()
    if was_reset and not resets:
        warnings.warn(
            "the kernel does not let this process reset its peak resident set (/proc/self/clear_refs): "
            "peak_resident_bytes is the peak since the process started",
            RuntimeWarning,
            stacklevel=3,
        )
    return resets


def trim_heap() -> None:
    """Return the C library's free heap pages to the kernel, where it can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Reader of this process's memory and of the limits the system sets on it.

    Attributes:
        root: Where ``proc`` and ``sys`` are looked up; ``/`` outside tests.
    """

    root: Path = Path("/")

    def resident_bytes(self) -> int:
        """Return the resident set of this process (VmRSS)."""
        return int(self._read("proc/self/statm").split()[1]) * _PAGE_BYTES

    def peak_resident_bytes(self) -> int:
        """Return the largest resident set since the last ``reset_peak_resident``, or since the start (VmHWM)."""
        return _table(self._read("proc/self/status"))["VmHWM"]

    def reset_peak_resident(self) -> bool:
        """Start VmHWM again from the resident set; return False where the kernel does not allow it."""
        try:
            (self.root / "proc/self/clear_refs").write_text("5")
        except OSError:
            return False
        return True

    def growth_bytes(self) -> int:
        """Return how many more bytes the kernel can give this process now, over every limit that applies; at least 0.

        The smallest of available memory, the control groups' limits (both versions) and the address-space and data
        limits of the process.
        """
        status = _table(self._read("proc/self/status"))
        growth = [_table(self._read("proc/meminfo"))["MemAvailable"], *self._cgroup_growth()]
        for limit, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
            soft, _ = resource.getrlimit(limit)
            if soft != resource.RLIM_INFINITY:
                growth.append(soft - status[used])
        return max(0, min(growth))

    def _cgroup_growth(self) -> list[int]:
        growth = []
        for line in self._read("proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                base, limit, usage, inactive = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
            elif "memory" in controllers.split(","):
                base, limit, usage, inactive = (
                    "sys/fs/cgroup/memory",
                    "memory.limit_in_bytes",
                    "memory.usage_in_bytes",
                    "total_inactive_file",
                )
            else:
                continue
            top = self.root / base
            # In a container the path is the host's and does not exist below the mount: the mount itself is the group.
            own = top / path.lstrip("/")
            group = own if own.is_dir() else top
            while True:
                room = _group_growth(group, limit=limit, usage=usage, inactive=inactive)
                if room is not None:
                    growth.append(room)
                if group == top:
                    break
                group = group.parent
        return growth

    def _read(self, name: str) -> str:
        path = self.root / name
        try:
            return path.read_text()
        except OSError as error:
            raise MeterError(
                f"{path} cannot be read ({error.strerror}): the CPU meter needs Linux's /proc. Run on Linux, or pass a "
                "SimulatedMeter"
            ) from error


def _group_growth(group: Path, *, limit: str, usage: str, inactive: str) -> int | None:
    """Return the bytes a control group still allows, counting inactive file pages as free; None when unlimited."""
    try:
        text = (group / limit).read_text().strip()
        if text == "max":
            return None
        used = int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        # The root group has no limit file, and a group may not be readable from inside a container.
        return None
    return int(text) - used + int(stat.get(inactive, "0"))


def _table(text: str) -> dict[str, int]:
    """Return the ``Name:  123 kB`` lines of a /proc file, in bytes."""
    rows = (line.split() for line in text.splitlines())
    return {row[0].rstrip(":"): int(row[1]) * KIB for row in rows if len(row) == 3 and row[2] == "kB"}
