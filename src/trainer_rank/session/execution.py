"""Runs what was admitted, maps what goes wrong, and measures what it needed."""

from __future__ import annotations

import time
from collections.abc import Generator

from trainer_rank.admission import Admission
from trainer_rank.executor.oom import map_out_of_memory
from trainer_rank.executor.run import PassResult, run_forward
from trainer_rank.memory import Observation
from trainer_rank.meters import Meter, Reading
from trainer_rank.planner import PassWork
from trainer_rank.requests import Flat, Normaliser, cut
from trainer_rank.runtime import Runtime
from trainer_rank.session.candidates import Candidate
from trainer_rank.session.decisions import Decisions
from trainer_rank.session.micro_batch import MicroBatch, MicroBatchStats, Result
from trainer_rank.session.split import SplitRange


class Execution:
    """Runs admitted candidates on a model.

    Args:
        runtime: The model.
        meter: Measures the device.
        decisions: Told of each candidate and of what it needed.
        head_chunk_rows: Rows that meet the vocabulary projection at a time.

    Attributes:
        last_observation: Of the micro-batch that was done last; None before the first.
    """

    def __init__(self, runtime: Runtime, meter: Meter, decisions: Decisions, *, head_chunk_rows: int) -> None:
        self._runtime = runtime
        self._meter = meter
        self._decisions = decisions
        self._head_chunk_rows = head_chunk_rows
        self.last_observation: Observation | None = None

    def run(
        self, flat: Flat, rule: Normaliser, candidate: Candidate, verdict: Admission, *, split: tuple[SplitRange, ...]
    ) -> Generator[MicroBatch]:
        """Yield the one micro-batch of an admitted candidate, its forwards done; measure it when the caller goes on.

        ``split`` is that of the whole call, and goes to the caller with the micro-batch.

        Raises:
            TrainerRankMemoryError: It ran out of memory.
        """
        begin, clock = self._meter.read(), time.perf_counter()
        number = self._decisions.admission(candidate, verdict)
        self._meter.reset_peak()
        micro_batch = self._micro_batch(flat, rule, candidate, verdict, split)
        try:
            yield micro_batch
        finally:
            observed = self._observe(candidate, begin)
            micro_batch.observed = self.last_observation = observed
            self._decisions.observation(number, observed, verdict, seconds=time.perf_counter() - clock)

    def _micro_batch(
        self, flat: Flat, rule: Normaliser, candidate: Candidate, verdict: Admission, split: tuple[SplitRange, ...]
    ) -> MicroBatch:
        found: dict[int, Result] = dict.fromkeys(candidate.indices, Result())
        for work in candidate.works:
            result = self._forward(work, verdict)
            found.update(
                (index, Result.of(outputs)) for index, outputs in zip(work.indices, result.outputs, strict=True)
            )
        requests = {index: flat.leaves[index] for index in candidate.indices}
        return MicroBatch(
            inputs=cut(flat.nest, requests),
            outputs=cut(flat.nest, found),
            indices=candidate.indices,
            requests=tuple(requests.values()),
            results=tuple(found[index] for index in candidate.indices),
            coefficients=tuple(rule.coefficients[index] for index in candidate.indices),
            num_trained=rule.num_trained,
            stats=MicroBatchStats.of(candidate.works, len(candidate.indices), verdict),
            split=split,
        )

    def _forward(self, work: PassWork, verdict: Admission) -> PassResult:
        phase = "forward"

        def mark(name: str) -> None:
            nonlocal phase
            phase = name

        def map_error(error: BaseException) -> BaseException:
            return map_out_of_memory(error, admission=verdict, phase="backward")

        try:
            return run_forward(
                self._runtime, work, head_chunk_rows=self._head_chunk_rows, map_error=map_error, mark=mark
            )
        except Exception as error:
            mapped = map_out_of_memory(error, admission=verdict, phase=phase)
            if mapped is error:
                raise
            raise mapped from error

    def _observe(self, candidate: Candidate, begin: Reading) -> Observation:
        now = self._meter.read()
        return Observation(
            packed_rows=sum(work.batch.packed_rows for work in candidate.works),
            logical_tokens=sum(work.batch.logical_tokens for work in candidate.works),
            head_rows=sum(work.head.num_rows for work in candidate.works),
            num_segments=sum(work.batch.num_segments for work in candidate.works),
            num_requests=sum(len(work.indices) for work in candidate.works),
            peak_bytes=max(0, now.peak_allocated_bytes - begin.allocated_bytes),
            peak_resident_bytes=now.peak_resident_bytes,
        )
