"""What a micro-batch was measured to need, phase by phase."""

from __future__ import annotations

from trainer_rank.meters import Meter


class PeakWatch:
    """Peaks of new device memory from the begin of a micro-batch on.

    The forward lasts until the caller gets the outputs, the caller's loss until the first inner backward begins.

    Args:
        meter: Measures the device; its peak starts again now, and whenever a phase ends.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._begin = meter.read().allocated_bytes
        self._live = self._begin
        self._phase = "forward"
        self._resident: int | None = None
        self.peaks: dict[str, int] = {}
        self.caller_bytes: int | None = None
        self.retained_bytes: int | None = None
        meter.reset_peak()

    @property
    def peak_bytes(self) -> int:
        """The largest of the peaks."""
        return max(self.peaks.values())

    @property
    def phase(self) -> str:
        """Phase of the largest peak, the first of equals."""
        return max(self.peaks, key=lambda phase: self.peaks[phase])

    @property
    def peak_resident_bytes(self) -> int | None:
        """Largest resident bytes, where the device reports them."""
        return self._resident

    def outputs_done(self) -> None:
        """Tell that the caller gets the outputs."""
        self._end()
        self.retained_bytes = max(0, self._live - self._begin)
        self._phase = "loss"

    def backward_begins(self) -> None:
        """Tell that an inner backward begins; only the first ends the caller's loss."""
        if self._phase != "loss":
            return
        live = self._live
        # From what was live when the loss began: a forward frees what others left behind, and may end below its begin.
        self.caller_bytes = max(0, self._end() - live)
        self._phase = "backward"

    def finish(self) -> None:
        """Tell that the micro-batch is done."""
        self._end()

    def _end(self) -> int:
        """End the phase and return its peak of all allocated bytes."""
        reading = self._meter.read()
        self.peaks[self._phase] = max(0, reading.peak_allocated_bytes - self._begin)
        self._live = reading.allocated_bytes
        if reading.peak_resident_bytes is not None:
            self._resident = max(self._resident or 0, reading.peak_resident_bytes)
        self._meter.reset_peak()
        return reading.peak_allocated_bytes
