"""What a device's memory is at one moment (``Reading``), and how it is asked (``Meter``). Imports no torch.

A reading is an observation: it says what was, never what a pass will need. Prices are another type, from another layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import TracebackType
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Device memory at one moment, in bytes.

    Attributes:
        allocated_bytes: Live through the device allocator, as asked for, since the meter was installed. Tensors that
            are older than the meter are in ``resident_bytes`` only.
        reserved_bytes: Held by the device allocator: live blocks, their rounding, and blocks cached for reuse.
        resident_bytes: Everything on the device. CPU: the resident set of this process. CUDA: total minus free, so
            other processes and library handles count.
        peak_allocated_bytes: Largest ``allocated_bytes`` since the last ``reset_peak``.
        peak_reserved_bytes: Largest ``reserved_bytes`` since the last ``reset_peak``.
        peak_resident_bytes: Largest ``resident_bytes`` since the last ``reset_peak``; None where nothing records it.
        peak_resident_since_reset: False where the system keeps that peak but does not let it be reset: it is then the
            peak since the process started.
        budget_bytes: What the caller allows on the device, weights included.
        reserve_bytes: Part of the budget kept for what no allocator sees (library handles, heap growth), and for what
            a caching allocator wastes between its blocks.
        available_bytes: What one admission may hand out now: physically free within the budget, less the reserve,
            never below 0.
    """

    allocated_bytes: int
    reserved_bytes: int
    resident_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_resident_bytes: int | None
    peak_resident_since_reset: bool
    budget_bytes: int
    reserve_bytes: int
    available_bytes: int

    def __post_init__(self) -> None:
        assert self.available_bytes >= 0, f"available_bytes is negative: {self.available_bytes}"
        assert self.budget_bytes >= 0, f"budget_bytes is negative: {self.budget_bytes}"
        assert self.reserve_bytes >= 0, f"reserve_bytes is negative: {self.reserve_bytes}"

    @property
    def over_budget_bytes(self) -> int:
        """Bytes by which the device already holds more than the budget less the reserve; 0 when it does not."""
        return max(0, self.resident_bytes + self.reserve_bytes - self.budget_bytes)


class Meter(ABC):
    """Measures one device and holds work on it to a budget. Implementations are final; wrap one to change it.

    The order of use: ``prepare`` right before an admission, ``reset_peak`` right before the pass, ``read`` after it.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Which mechanism measures: ``"cpu-counting"``, ``"cpu-tracking"``, ``"cuda"`` or ``"simulated"``."""

    @property
    @abstractmethod
    def device(self) -> str:
        """The device as torch spells it: ``"cpu"``, ``"cuda:0"``."""

    @abstractmethod
    def read(self) -> Reading:
        """Return the counters now. Changes nothing."""

    @abstractmethod
    def prepare(self, needed_bytes: int | None = None) -> Reading:
        """Return a reading to admit against, and arm the hard cap that goes with it.

        Cached blocks are released at most once, and only when ``needed_bytes`` (None: as much as there is) exceeds what
        is available without that; the physical counters are read again afterwards. Until the next ``prepare``, an
        allocation beyond the cap raises ``torch.OutOfMemoryError`` where the allocator can be capped.
        """

    @abstractmethod
    def reset_peak(self) -> None:
        """Start the peaks again from what is live now."""

    @abstractmethod
    def release_cached(self) -> None:
        """Give every cached block back to the device. Live memory is untouched."""

    @abstractmethod
    def close(self) -> None:
        """Lift the cap and stop measuring. Live tensors stay valid. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
