"""The CUDA meter: torch's caching allocator beside what the driver says is physically free.

Cached blocks are never credited before they are released: a cache of many gigabytes may hold no block of the size that
is asked for, and "free plus cached" then promises memory that is not there.
"""

from __future__ import annotations

from typing import Final, Protocol, final

from trainer_rank.errors import MeterError
from trainer_rank.meters.base import Meter, Reading
from trainer_rank.meters.waste import SEGMENTS_BYTES, expandable_by_environment, waste_bytes, waste_share
from trainer_rank.units import format_bytes, parse_bytes

# Kept for library handles and workspaces that no allocator of torch's sees (cuBLAS, NCCL).
RESERVE_FRACTION: Final = 0.03


class CudaCounters(Protocol):
    """What the meter asks one CUDA device. ``TorchCudaCounters`` asks torch; a test injects numbers."""

    def total_bytes(self) -> int: ...

    def free_bytes(self) -> int:
        """Return the bytes physically free on the device, as the driver sees them."""
        ...

    def allocated_bytes(self) -> int: ...

    def reserved_bytes(self) -> int: ...

    def peak_allocated_bytes(self) -> int: ...

    def peak_reserved_bytes(self) -> int: ...

    def reset_peak(self) -> None: ...

    def release_cached(self) -> None: ...

    def set_cap(self, cap_bytes: int) -> None:
        """Bound the bytes torch's allocator may reserve."""
        ...


@final
class CudaMeter(Meter):
    """Measures one CUDA device and caps torch's allocator on it when the budget is below the device's memory.

    Allocated bytes are those of torch's caching allocator: every tensor of the process on the device, older ones too,
    each rounded up to its block. The cap bounds what the allocator reserves, cached blocks included; the allocator
    gives those back by itself before it raises.
    """

    def __init__(
        self,
        device: str = "cuda",
        memory_budget: int | str | None = None,
        reserve_fraction: float = RESERVE_FRACTION,
        *,
        waste_fraction: float | None = None,
        counters: CudaCounters | None = None,
    ) -> None:
        """Open the meter and arm its cap.

        Args:
            device: ``"cuda"`` (the current device) or ``"cuda:<index>"``.
            memory_budget: Bytes that may be in use on the device, other processes included. None: all of it.
            reserve_fraction: Part of the budget kept for what torch's allocator does not see, in [0, 1).
            waste_fraction: What the allocator may waste, as a share of live bytes. None: by its settings, and two
                segments besides (``meters.waste``).
            counters: Where the numbers come from. None: torch.

        Raises:
            ValueError: ``memory_budget`` or ``reserve_fraction`` is malformed, or the budget exceeds the device.
            MeterError: torch sees no such device.
        """
        if not 0 <= reserve_fraction < 1:
            raise ValueError(f"reserve_fraction must be in [0, 1), got {reserve_fraction}")
        if counters is None:
            counters = TorchCudaCounters(device)
            device = counters.device
        self._counters = counters
        self._device = device
        total = counters.total_bytes()
        budget = total if memory_budget is None else parse_bytes(memory_budget, field="memory_budget")
        if budget > total:
            raise ValueError(
                f"memory_budget must not exceed the device's memory, got {format_bytes(budget)} on {device} with "
                f"{format_bytes(total)}; lower it or leave it out"
            )
        self._budget_bytes = budget
        # A caller who gives the share means all of it.
        self._waste_fixed = SEGMENTS_BYTES if waste_fraction is None else 0
        self._waste_fraction = waste_share(expandable_by_environment()) if waste_fraction is None else waste_fraction
        self._reserve_bytes = int(budget * reserve_fraction)
        self._total_bytes = total
        self._closed = False
        self.prepare()
        self.reset_peak()

    @property
    def name(self) -> str:
        return "cuda"

    @property
    def device(self) -> str:
        return self._device

    def read(self) -> Reading:
        self._check_open()
        free = self._counters.free_bytes()
        resident = self._total_bytes - free
        available = max(0, min(free, self._budget_bytes - resident) - self._reserve_bytes)
        waste = waste_bytes(available, self._waste_fraction, self._waste_fixed)
        return Reading(
            allocated_bytes=self._counters.allocated_bytes(),
            reserved_bytes=self._counters.reserved_bytes(),
            resident_bytes=resident,
            peak_allocated_bytes=self._counters.peak_allocated_bytes(),
            peak_reserved_bytes=self._counters.peak_reserved_bytes(),
            peak_resident_bytes=None,
            peak_resident_since_reset=False,
            budget_bytes=self._budget_bytes,
            reserve_bytes=self._reserve_bytes + waste,
            available_bytes=max(0, available - waste),
        )

    def prepare(self, needed_bytes: int | None = None) -> Reading:
        reading = self.read()
        enough = needed_bytes is not None and needed_bytes <= reading.available_bytes
        if not enough and reading.reserved_bytes > reading.allocated_bytes:
            self._counters.release_cached()
            reading = self.read()
        if self._budget_bytes < self._total_bytes:
            outside = reading.resident_bytes - reading.reserved_bytes
            self._counters.set_cap(max(0, self._budget_bytes - self._reserve_bytes - outside))
        return reading

    def reset_peak(self) -> None:
        self._check_open()
        self._counters.reset_peak()

    def release_cached(self) -> None:
        self._check_open()
        self._counters.release_cached()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._budget_bytes < self._total_bytes:
            self._counters.set_cap(self._total_bytes)

    def _check_open(self) -> None:
        if self._closed:
            raise MeterError(f"this meter is closed; open a new one with open_meter({self._device!r})")


@final
class TorchCudaCounters:
    """The counters of torch's caching allocator and of the driver, for one device."""

    def __init__(self, device: str) -> None:
        import torch

        if not torch.cuda.is_available():
            raise MeterError(f"device {device!r} was asked for, but torch sees no CUDA device; use device 'cpu'")
        try:
            index = torch.device(device).index
        except RuntimeError as error:
            raise MeterError(f"device must be 'cuda' or 'cuda:<index>', got {device!r}") from error
        self._index = torch.cuda.current_device() if index is None else index
        if self._index >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            raise MeterError(f"device {device!r} was asked for, but torch sees {count} CUDA devices")
        self._cuda = torch.cuda

    @property
    def device(self) -> str:
        return f"cuda:{self._index}"

    def total_bytes(self) -> int:
        return self._cuda.mem_get_info(self._index)[1]

    def free_bytes(self) -> int:
        return self._cuda.mem_get_info(self._index)[0]

    def allocated_bytes(self) -> int:
        return self._cuda.memory_allocated(self._index)

    def reserved_bytes(self) -> int:
        return self._cuda.memory_reserved(self._index)

    def peak_allocated_bytes(self) -> int:
        return self._cuda.max_memory_allocated(self._index)

    def peak_reserved_bytes(self) -> int:
        return self._cuda.max_memory_reserved(self._index)

    def reset_peak(self) -> None:
        self._cuda.reset_peak_memory_stats(self._index)

    def release_cached(self) -> None:
        # Work in flight may still use blocks of other streams; only idle blocks can be given back.
        self._cuda.synchronize(self._index)
        with self._cuda.device(self._index):
            self._cuda.empty_cache()

    def set_cap(self, cap_bytes: int) -> None:
        self._cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / self.total_bytes()), self._index)
