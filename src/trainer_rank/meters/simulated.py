"""A device that is not there: counters set by hand, for tests and for trying a budget without the machine.

No torch. An allocation past the budget raises ``SimulatedOutOfMemoryError``; bytes freed stay reserved until released,
as in a caching allocator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from trainer_rank.errors import MeterError
from trainer_rank.meters.base import Meter, Reading
from trainer_rank.units import parse_bytes


class SimulatedOutOfMemoryError(MemoryError):
    """The simulated device cannot give that many bytes.

    Attributes:
        wanted_bytes: The allocation refused.
    """

    def __init__(self, message: str, *, wanted_bytes: int) -> None:
        super().__init__(message)
        self.wanted_bytes = wanted_bytes


@final
class SimulatedMeter(Meter):
    """A meter whose counters are plain attributes.

    Attributes:
        allocated_bytes: Live bytes.
        cached_bytes: Freed bytes that the allocator keeps; ``release_cached`` gives them back.
        outside_bytes: Resident bytes that the allocator does not own.
        releases: How many times cached bytes were released.
        on_release: Called after each release, with the meter: change the counters there to play another process, or a
            release that frees less than hoped.
    """

    def __init__(
        self,
        budget_bytes: int | str,
        *,
        reserve_bytes: int = 0,
        outside_bytes: int = 0,
        on_release: Callable[[SimulatedMeter], None] | None = None,
    ) -> None:
        self._budget_bytes = parse_bytes(budget_bytes, field="budget_bytes")
        self._reserve_bytes = parse_bytes(reserve_bytes, field="reserve_bytes")
        self.outside_bytes = outside_bytes
        self.allocated_bytes = 0
        self.cached_bytes = 0
        self.releases = 0
        self.on_release = on_release
        self._peak_allocated_bytes = 0
        self._peak_reserved_bytes = 0
        self._closed = False

    @property
    def name(self) -> str:
        return "simulated"

    @property
    def device(self) -> str:
        return "cpu"

    def allocate(self, size_bytes: int) -> None:
        """Make ``size_bytes`` live, from the cache first, releasing the rest of it once when that is needed.

        Raises:
            SimulatedOutOfMemoryError: The budget less the reserve cannot hold them. The counters are as before, less
                the cache.
        """
        reused = min(size_bytes, self.cached_bytes)
        if size_bytes - reused > self._free_bytes():
            self.release_cached()
            reused = 0
        if size_bytes - reused > self._free_bytes():
            raise SimulatedOutOfMemoryError(
                f"tried to allocate {size_bytes} bytes, {self._free_bytes()} are free of {self._budget_bytes}",
                wanted_bytes=size_bytes,
            )
        self.cached_bytes -= reused
        self.allocated_bytes += size_bytes
        self._note_peaks()

    def free(self, size_bytes: int) -> None:
        """Move ``size_bytes`` from live to cached."""
        assert size_bytes <= self.allocated_bytes, f"freed {size_bytes} of {self.allocated_bytes} live bytes"
        self.allocated_bytes -= size_bytes
        self.cached_bytes += size_bytes

    def read(self) -> Reading:
        self._check_open()
        self._note_peaks()
        return Reading(
            allocated_bytes=self.allocated_bytes,
            reserved_bytes=self.allocated_bytes + self.cached_bytes,
            resident_bytes=self.outside_bytes + self.allocated_bytes + self.cached_bytes,
            peak_allocated_bytes=self._peak_allocated_bytes,
            peak_reserved_bytes=self._peak_reserved_bytes,
            peak_resident_bytes=None,
            peak_resident_since_reset=False,
            budget_bytes=self._budget_bytes,
            reserve_bytes=self._reserve_bytes,
            available_bytes=max(0, self._free_bytes()),
        )

    def prepare(self, needed_bytes: int | None = None) -> Reading:
        reading = self.read()
        enough = needed_bytes is not None and needed_bytes <= reading.available_bytes
        if enough or self.cached_bytes == 0:
            return reading
        self.release_cached()
        return self.read()

    def reset_peak(self) -> None:
        self._check_open()
        self._peak_allocated_bytes = self.allocated_bytes
        self._peak_reserved_bytes = self.allocated_bytes + self.cached_bytes

    def release_cached(self) -> None:
        self._check_open()
        self.cached_bytes = 0
        self.releases += 1
        if self.on_release is not None:
            self.on_release(self)

    def close(self) -> None:
        self._closed = True

    def _free_bytes(self) -> int:
        held = self.outside_bytes + self.allocated_bytes + self.cached_bytes
        return self._budget_bytes - self._reserve_bytes - held

    def _note_peaks(self) -> None:
        self._peak_allocated_bytes = max(self._peak_allocated_bytes, self.allocated_bytes)
        self._peak_reserved_bytes = max(self._peak_reserved_bytes, self.allocated_bytes + self.cached_bytes)

    def _check_open(self) -> None:
        if self._closed:
            raise MeterError("this meter is closed; make a new SimulatedMeter")
