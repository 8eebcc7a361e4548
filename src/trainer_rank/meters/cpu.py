"""The CPU meter: torch's allocations counted exactly, capped, and followed by the resident set.

Opening it replaces torch's CPU allocator for the rest of the process (``counting_allocator.cpp``) and tunes the C
library's heap. Tensors that exist already are untouched, and count as resident bytes outside the allocator.
"""

from __future__ import annotations

import warnings
from typing import Final, final

from trainer_rank.errors import MeterError
from trainer_rank.meters.base import Meter, Reading
from trainer_rank.meters.counting_lib import load
from trainer_rank.meters.cpu_budget import CpuBudget
from trainer_rank.meters.host_memory import HostMemory, trim_heap, tune_malloc
from trainer_rank.units import MIB, parse_bytes

# Large enough for the blocks one recomputed layer frees and asks for again (docs/meters.md), small beside the budget.
CACHE_LIMIT_BYTES: Final = 256 * MIB
CACHE_LIMIT_FRACTION: Final = 1 / 16

# An unasked release must free at least this part of what is available: the cache is worth its page faults.
RELEASE_GAIN: Final = 1 / 16


@final
class CpuMeter(Meter):
    """Exact live and peak bytes of torch on the CPU, and a real ``torch.OutOfMemoryError`` at the cap.

    The allocator is one per process. Every meter reads the same counters; the budget armed is that of the meter whose
    ``prepare`` (or construction) came last, and closing that meter lifts the cap.
    """

    def __init__(
        self,
        memory_budget: int | str | None = None,
        reserve_bytes: int | None = None,
        cache_limit_bytes: int | None = None,
        *,
        host: HostMemory | None = None,
    ) -> None:
        """Open the meter and arm its cap.

        Args:
            memory_budget: Bytes the whole process may hold resident, as an int or a string such as ``"2GiB"``. None:
                all that the kernel can give it now.
            reserve_bytes: Part of it kept for what grows outside the allocator. None: 64 MiB or 2 % of a stated budget,
                512 MiB or 5 % of an unstated one, whichever is more.
            cache_limit_bytes: Most bytes kept for reuse after they are freed. None: 256 MiB or a sixteenth of the
                budget, whichever is less.
            host: Where the system's numbers come from.

        Raises:
            ValueError: A number of bytes is malformed or negative.
            MeterError: The allocator cannot be built or installed, or the system's counters cannot be read.
        """
        self._host = host if host is not None else HostMemory()
        self._budget = CpuBudget.resolve(memory_budget, reserve_bytes, self._host)
        if cache_limit_bytes is None:
            cache_limit_bytes = min(CACHE_LIMIT_BYTES, int(self._budget.budget_bytes * CACHE_LIMIT_FRACTION))
        self._cache_limit_bytes = parse_bytes(cache_limit_bytes, field="cache_limit_bytes")
        self._closed = False
        self._peak_resets = True
        self._library = load()
        tune_malloc()
        self._library.install()
        self.prepare()
        self.reset_peak()

    @property
    def name(self) -> str:
        return "cpu-counting"

    @property
    def device(self) -> str:
        return "cpu"

    def read(self) -> Reading:
        self._check_open()
        live = self._library.live_bytes()
        owned = self._library.resident_bytes()
        resident = self._host.resident_bytes()
        return Reading(
            allocated_bytes=live,
            reserved_bytes=self._library.reserved_bytes(),
            resident_bytes=resident,
            peak_allocated_bytes=self._library.peak_bytes(),
            peak_reserved_bytes=self._library.peak_reserved_bytes(),
            peak_resident_bytes=self._host.peak_resident_bytes(),
            peak_resident_since_reset=self._peak_resets,
            budget_bytes=self._budget.budget_bytes,
            reserve_bytes=self._budget.reserve_bytes,
            available_bytes=self._budget.available_bytes(
                outside_bytes=max(0, resident - owned), live_bytes=live, growth_bytes=self._host.growth_bytes()
            ),
        )

    def prepare(self, needed_bytes: int | None = None) -> Reading:
        trim_heap()
        reading = self.read()
        # The allocator drops its cache whenever the cap asks for it, so cached bytes stand in the way only where the
        # kernel has less to give than the budget allows.
        wanted_bytes = needed_bytes if needed_bytes is not None else int(reading.available_bytes * (1 + RELEASE_GAIN))
        if reading.available_bytes < wanted_bytes and self._library.cached_bytes() > 0 and self._kernel_limits(reading):
            self.release_cached()
            reading = self.read()
        self._library.owner = self
        self._library.set_cache_limit(self._cache_limit_bytes)
        self._library.set_cap(
            self._budget.cap_bytes(available_bytes=reading.available_bytes, live_bytes=reading.allocated_bytes)
        )
        return reading

    def reset_peak(self) -> None:
        self._check_open()
        self._library.reset_peak()
        resets = self._host.reset_peak_resident()
        if self._peak_resets and not resets:
            warnings.warn(
                "the kernel does not let this process reset its peak resident set (/proc/self/clear_refs): "
                "peak_resident_bytes is the peak since the process started",
                RuntimeWarning,
                stacklevel=2,
            )
        self._peak_resets = resets

    def release_cached(self) -> None:
        self._check_open()
        self._library.release_cached()
        trim_heap()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._library.owner is self:
            self._library.owner = None
            self._library.set_cap(None)
            self._library.set_cache_limit(0)
