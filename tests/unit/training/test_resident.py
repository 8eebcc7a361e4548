"""The peak resident set survives a meter that starts the system's peak again."""

from __future__ import annotations

import dataclasses

from trainer_rank.memory import Observation
from trainer_rank.training.resident import ResidentPeak

OBSERVATION = Observation(
    packed_rows=1, logical_tokens=1, head_rows=1, num_segments=1, num_requests=1, peak_bytes=0, peak_resident_bytes=None
)


def test_a_noted_peak_is_kept_when_the_system_reports_less_later() -> None:
    """What a pass was observed to need outlives the reset of the system's own counter."""
    peak = ResidentPeak()
    now = peak.sample()
    peak.note(dataclasses.replace(OBSERVATION, peak_resident_bytes=2**50))
    assert 0 < now < 2**50
    assert peak.sample() == 2**50


def test_an_unmeasured_peak_changes_nothing() -> None:
    """No observation, and one without a resident peak, leave the peak as it is."""
    peak = ResidentPeak()
    peak.note(dataclasses.replace(OBSERVATION, peak_resident_bytes=2**50))
    peak.note(None)
    peak.note(OBSERVATION)
    assert peak.sample() == 2**50
