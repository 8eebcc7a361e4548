"""The CPU meter: torch's allocations counted exactly, capped, and followed by the resident set.

Opening it replaces torch's CPU allocator for the rest of the process (``counting_allocator.cpp``) and tunes the C
library's heap. Tensors that exist already are untouched, and count as resident bytes outside the allocator.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, final

from trainer_rank.errors import MeterError
from trainer_rank.meters.base import Meter, Reading
from trainer_rank.meters.counting_lib import load
from trainer_rank.meters.cpu_budget import CpuBudget
from trainer_rank.meters.host_memory import HostMemory, reset_peak_or_warn, trim_heap, tune_malloc
from trainer_rank.units import parse_bytes

# A pass without recompute frees and asks again for most of the budget; a fresh page costs more than the arithmetic on
# it (docs/meters.md). Cached blocks count against the cap and are given back first, so the budget holds all the same.
CACHE_LIMIT_FRACTION: Final = 1 / 2

# An unasked release must free at least this part of what is available: the cache is worth its page faults.
RELEASE_GAIN: Final = 1 / 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """The raw counters of one moment, in bytes. ``owned_bytes`` is the resident part of live plus cached."""

    live_bytes: int
    cached_bytes: int
    owned_bytes: int
    resident_bytes: int
    growth_bytes: int


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
            cache_limit_bytes: Most bytes kept for reuse after they are freed. None: half the budget.
            host: Where the system's numbers come from.

        Raises:
            ValueError: A number of bytes is malformed or negative.
            MeterError: The allocator cannot be built or installed, or the system's counters cannot be read.
        """
        self._host = host if host is not None else HostMemory()
        self._budget = CpuBudget.resolve(memory_budget, reserve_bytes, self._host)
        if cache_limit_bytes is None:
            cache_limit_bytes = int(self._budget.budget_bytes * CACHE_LIMIT_FRACTION)
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
        return self._reading(self._measure())

    def prepare(self, needed_bytes: int | None = None) -> Reading:
        self._check_open()
        trim_heap()
        measured = self._measure()
        available = self._available(measured)
        # The allocator drops its cache whenever the cap asks for it, so cached bytes stand in the way only where the
        # kernel has less to give than the budget allows.
        released = replace(measured, growth_bytes=measured.growth_bytes + measured.cached_bytes)
        gain = self._available(released) - available
        if gain > 0 and (gain > available * RELEASE_GAIN if needed_bytes is None else needed_bytes > available):
            self._library.release_cached()
            measured = self._measure()
            available = self._available(measured)
        self._library.owner = self
        self._library.set_cache_limit(self._cache_limit_bytes)
        self._library.set_cap(self._budget.cap_bytes(available_bytes=available, live_bytes=measured.live_bytes))
        return self._reading(measured)

    def reset_peak(self) -> None:
        self._check_open()
        self._library.reset_peak()
        self._peak_resets = reset_peak_or_warn(self._host, was_reset=self._peak_resets)

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

    def _measure(self) -> _Measured:
        self._check_open()
        return _Measured(
            live_bytes=self._library.live_bytes(),
            cached_bytes=self._library.cached_bytes(),
            # Asked before the resident set, so that a block mapped in between counts as outside rather than not at all.
            owned_bytes=self._library.resident_bytes(),
            resident_bytes=self._host.resident_bytes(),
            growth_bytes=self._host.growth_bytes(),
        )

    def _available(self, measured: _Measured) -> int:
        return self._budget.available_bytes(
            outside_bytes=max(0, measured.resident_bytes - measured.owned_bytes),
            live_bytes=measured.live_bytes,
            growth_bytes=measured.growth_bytes,
        )

    def _reading(self, measured: _Measured) -> Reading:
        return Reading(
            allocated_bytes=measured.live_bytes,
            reserved_bytes=self._library.reserved_bytes(),
            resident_bytes=measured.resident_bytes,
            peak_allocated_bytes=self._library.peak_bytes(),
            peak_reserved_bytes=self._library.peak_reserved_bytes(),
            peak_resident_bytes=self._host.peak_resident_bytes(),
            peak_resident_since_reset=self._peak_resets,
            budget_bytes=self._budget.budget_bytes,
            reserve_bytes=self._budget.reserve_bytes,
            available_bytes=self._available(measured),
        )

    def _check_open(self) -> None:
        if self._closed:
            raise MeterError("this meter is closed; open a new one with open_meter('cpu', memory_budget=...)")
