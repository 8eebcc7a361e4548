"""Numbers the decisions of a rank and hands their records out."""

from __future__ import annotations

from collections.abc import Callable

from trainer_rank.admission import Admission
from trainer_rank.memory import Observation
from trainer_rank.report import Record, admission_record, observation_record
from trainer_rank.runtime import Runtime
from trainer_rank.session.candidates import Candidate
from trainer_rank.session.pricing import Pricer


class Decisions:
    """The records of one rank, in the order its decisions were made.

    Args:
        runtime: Its facts and its recompute mode are part of a record.
        pricer: What a price was made of is part of it too.
        listener: Called with each record; None keeps none.
    """

    def __init__(self, runtime: Runtime, pricer: Pricer, listener: Callable[[Record], None] | None) -> None:
        self._runtime = runtime
        self._pricer = pricer
        self._listener = listener
        self._count = 0

    def admission(self, candidate: Candidate, verdict: Admission) -> int:
        """Hand out the record of a verdict and return its number, from 1."""
        self._count += 1
        self._emit(
            admission_record(
                self._count,
                candidate.works,
                verdict,
                recompute=self._runtime.recompute,
                pricing=self._pricer.facts(candidate.forwards),
                facts=self._runtime.facts,
            )
        )
        return self._count

    def observation(self, number: int, observed: Observation, verdict: Admission, *, seconds: float) -> None:
        """Hand out what an admitted micro-batch was measured to need, with what was predicted."""
        predicted = verdict.price.required_bytes
        self._emit(observation_record(number, observed, predicted_bytes=predicted, seconds=seconds))

    def _emit(self, record: Record) -> None:
        if self._listener is not None:
            self._listener(record)
