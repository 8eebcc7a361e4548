"""Runs what was admitted, maps what goes wrong, and measures what it needed."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Final

from trainer_rank.admission import Admission
from trainer_rank.errors import MeterError
from trainer_rank.executor.oom import map_out_of_memory
from trainer_rank.executor.run import PassResult, run_forward
from trainer_rank.memory import Observation
from trainer_rank.meters import Meter
from trainer_rank.planner import PassWork
from trainer_rank.requests import Flat, Normaliser, cut
from trainer_rank.runtime import Runtime
from trainer_rank.session.candidates import Candidate
from trainer_rank.session.decisions import Decisions
from trainer_rank.session.micro_batch import MicroBatch, MicroBatchStats, Result
from trainer_rank.session.peaks import PeakWatch
from trainer_rank.session.pricing import Pricer
from trainer_rank.session.split import SplitPart
from trainer_rank.units import format_bytes

_PER_REQUEST: Final = 1024
"""Bytes per request that no one has to declare: a loss makes some scalars of each, as the built-in ones do."""


class Execution:
    """Runs admitted candidates on a model.

    Args:
        runtime: The model.
        meter: Measures the device.
        decisions: Told of each candidate and of what it needed.
        pricer: Told of what it needed.
        head_chunk_rows: Rows that meet the vocabulary projection at a time.
        caller_bytes_per_token: What is declared of the caller's loss now, per logical token.

    Attributes:
        last_observation: Of the micro-batch that was done last; None before the first.
    """

    def __init__(
        self,
        runtime: Runtime,
        meter: Meter,
        decisions: Decisions,
        pricer: Pricer,
        *,
        head_chunk_rows: int,
        caller_bytes_per_token: Callable[[], int],
    ) -> None:
        self._runtime = runtime
        self._meter = meter
        self._decisions = decisions
        self._pricer = pricer
        self._head_chunk_rows = head_chunk_rows
        self._caller_bytes_per_token = caller_bytes_per_token
        self._warned = False
        self.last_observation: Observation | None = None

    def run(
        self, flat: Flat, rule: Normaliser, candidate: Candidate, verdict: Admission, *, split: tuple[SplitPart, ...]
    ) -> Generator[MicroBatch]:
        """Yield the one micro-batch of an admitted candidate, its forwards done; measure it when the caller goes on.

        ``split`` is that of the whole call, and goes to the caller with the micro-batch.

        Raises:
            TrainerRankMemoryError: It ran out of memory.
        """
        clock = time.perf_counter()
        number = self._decisions.admission(candidate, verdict)
        watch = PeakWatch(self._meter)
        micro_batch = self._micro_batch(flat, rule, candidate, verdict, split, watch)
        watch.outputs_done()

        def measure() -> None:
            watch.finish()
            observed = _observation(candidate, watch)
            micro_batch.observed = self.last_observation = observed
            self._pricer.observe(candidate.forwards, observed)
            self._check_caller(observed, _output_bytes(micro_batch.results))
            self._decisions.observation(number, observed, verdict, seconds=time.perf_counter() - clock)

        try:
            yield micro_batch
        except GeneratorExit:
            # The caller stopped half way. This runs when the iterator is collected, perhaps after its meter was closed.
            with contextlib.suppress(MeterError):
                measure()
            raise
        measure()

    def _micro_batch(
        self,
        flat: Flat,
        rule: Normaliser,
        candidate: Candidate,
        verdict: Admission,
        split: tuple[SplitPart, ...],
        watch: PeakWatch,
    ) -> MicroBatch:
        found: dict[int, Result] = dict.fromkeys(candidate.indices, Result())
        for work in candidate.works:
            result = self._forward(work, verdict, watch)
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

    def _forward(self, work: PassWork, verdict: Admission, watch: PeakWatch) -> PassResult:
        phase = "forward"

        def mark(name: str) -> None:
            nonlocal phase
            phase = name

        def map_error(error: BaseException) -> BaseException:
            return map_out_of_memory(error, admission=verdict, phase="backward")

        try:
            return run_forward(
                self._runtime,
                work,
                head_chunk_rows=self._head_chunk_rows,
                map_error=map_error,
                mark=mark,
                begin_backward=watch.backward_begins,
            )
        except Exception as error:
            mapped = map_out_of_memory(error, admission=verdict, phase=phase)
            if mapped is error:
                raise
            raise mapped from error

    def _check_caller(self, observed: Observation, output_bytes: int) -> None:
        """Warn, once, of a loss that needs more than was set aside for it: prices are short by what is missing.

        The gradients of the outputs are not the caller's: the pass's own price has them.
        """
        if self._warned or observed.caller_bytes is None or not observed.logical_tokens:
            return
        allowance = self._pricer.caller_allowance(self._caller_bytes_per_token())
        declared = allowance.bytes_per_token
        allowed = declared * observed.logical_tokens + _PER_REQUEST * observed.num_requests + output_bytes
        if observed.caller_bytes > allowed:
            self._warned = True
            needed = -(-observed.caller_bytes // observed.logical_tokens)
            warnings.warn(
                f"caller_above_declaration: the caller's loss needed {format_bytes(observed.caller_bytes)} of its own, "
                f"{needed} bytes per logical token, and {allowance.rule} {declared}; prices are short by the "
                f"difference. {allowance.next_step}",
                RuntimeWarning,
                stacklevel=4,
            )


def _output_bytes(results: Sequence[Result]) -> int:
    """Return the bytes of everything handed out that a loss can be computed from."""
    num_bytes = 0
    for one in results:
        ranked = None if one.top_k is None else one.top_k.logprobs
        for tensor in (one.logprobs, ranked, one.logits, one.hidden_states):
            num_bytes += 0 if tensor is None else tensor.nbytes
    return num_bytes


def _observation(candidate: Candidate, watch: PeakWatch) -> Observation:
    return Observation(
        packed_rows=sum(work.batch.packed_rows for work in candidate.works),
        logical_tokens=sum(work.batch.logical_tokens for work in candidate.works),
        head_rows=sum(work.head.num_rows for work in candidate.works),
        num_segments=sum(work.batch.num_segments for work in candidate.works),
        num_requests=sum(len(work.indices) for work in candidate.works),
        peak_bytes=watch.peak_bytes,
        peak_resident_bytes=watch.peak_resident_bytes,
        phase=watch.phase,
        caller_bytes=watch.caller_bytes,
        retained_bytes=watch.retained_bytes,
    )
