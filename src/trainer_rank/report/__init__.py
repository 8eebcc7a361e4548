"""What happened, for people and for replay. Pure records."""

from trainer_rank.report.decision import (
    AdmissionRecord,
    ObservationRecord,
    Record,
    admission_record,
    observation_record,
)
from trainer_rank.report.profile_replay import replay_profile

__all__ = [
    "AdmissionRecord", "ObservationRecord", "Record", "admission_record", "observation_record", "replay_profile",
]  # fmt: skip
