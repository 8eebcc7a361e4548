"""What the passes of one optimizer step add up to."""

from __future__ import annotations

from trainer_rank.memory import Observation
from trainer_rank.session import MicroBatchStats


class Passes:
    """Sums and maxima over the passes of one step; each ``add`` is followed by an ``observe`` once it has run."""

    def __init__(self) -> None:
        self.count = 0
        self.packed_rows = 0
        self.logical_tokens = 0
        self.trained_tokens = 0
        self.predicted_peak_bytes = 0
        self.observed_peak_bytes: int | None = None
        self._resident_bytes: int | None = None

    def add(self, stats: MicroBatchStats) -> None:
        self.count += stats.passes
        self.packed_rows += stats.packed_rows
        self.logical_tokens += stats.logical_tokens
        self.trained_tokens += stats.trained_tokens
        self.predicted_peak_bytes = max(self.predicted_peak_bytes, stats.predicted_peak_bytes)
        self._resident_bytes = stats.resident_bytes

    def observe(self, observation: Observation | None) -> None:
        if observation is not None and self._resident_bytes is not None:
            peak_bytes = self._resident_bytes + observation.peak_bytes
            self.observed_peak_bytes = max(self.observed_peak_bytes or 0, peak_bytes)
