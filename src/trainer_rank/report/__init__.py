"""What happened, for people and for replay. Pure records."""

from trainer_rank.report.decision import (
    AdmissionRecord,
    ObservationRecord,
    Record,
    admission_record,
    observation_record,
)

__all__ = ["AdmissionRecord", "ObservationRecord", "Record", "admission_record", "observation_record"]
