"""The peak resident set of a whole run, put together from pieces.

A meter may start the system's own peak again before each pass, so the system alone knows only the peak since then. The
piece that ends at a reset is in the pass's observation or in a sample taken before it.
"""

from __future__ import annotations

import resource
import sys

from trainer_rank.memory import Observation


class ResidentPeak:
    """Largest resident set of this process that was noted or sampled so far."""

    def __init__(self) -> None:
        self._peak_bytes = 0

    def sample(self) -> int:
        """Take the system's peak since its last reset into account, and return the whole run's so far, in bytes."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self._peak_bytes = max(self._peak_bytes, peak if sys.platform == "darwin" else peak * 1024)
        return self._peak_bytes

    def note(self, observation: Observation | None) -> None:
        """Take the peak of an executed pass into account."""
        if observation is not None and observation.peak_resident_bytes is not None:
            self._peak_bytes = max(self._peak_bytes, observation.peak_resident_bytes)
