"""A device of a few MiB inside a real process: the counting meter, offering so many bytes and capped at them."""

from __future__ import annotations

from dataclasses import replace

from trainer_rank.meters import Meter, Reading
from trainer_rank.meters.counting_lib import load


class CappedMeter(Meter):
    """Offers ``extra_bytes`` less what has become live since it was made; the allocator's real cap is set to the same.

    The resident set of a Python process moves by more than a tiny model's pass needs, so a budget on the process
    cannot be as small as these workloads are; the counting allocator's cap can.
    """

    def __init__(self, inner: Meter, extra_bytes: int) -> None:
        self._inner = inner
        self._extra_bytes = extra_bytes
        self._floor = inner.read().allocated_bytes

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def device(self) -> str:
        return self._inner.device

    def read(self) -> Reading:
        reading = self._inner.read()
        left = max(0, self._extra_bytes - (reading.allocated_bytes - self._floor))
        return replace(reading, available_bytes=min(left, reading.available_bytes))

    def prepare(self, needed_bytes: int | None = None) -> Reading:
        self._inner.prepare(needed_bytes)
        load().set_cap(self._floor + self._extra_bytes)
        return self.read()

    def reset_peak(self) -> None:
        self._inner.reset_peak()

    def release_cached(self) -> None:
        self._inner.release_cached()

    def close(self) -> None:
        self._inner.close()
