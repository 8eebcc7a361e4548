"""Peak of this process's resident set, from the kernel; standard library only."""

from __future__ import annotations

from pathlib import Path


def peak_resident_bytes() -> int:
    """Return the largest resident set since it was last reset."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not report VmHWM")


def reset_peak() -> None:
    """Begin the peak anew from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
