"""What one turn of ``forward_micro_batches`` hands to the caller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from trainer_rank.admission import Admission
from trainer_rank.executor.run import Outputs
from trainer_rank.memory import Observation
from trainer_rank.planner import PassWork
from trainer_rank.requests import Request
from trainer_rank.session.split import SplitPart

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopK:
    """The likeliest next tokens at M positions.

    Attributes:
        logprobs: (M, k) in descending order, float32 (float64 for float64 models).
        ids: (M, k) int64.
    """

    logprobs: Tensor
    ids: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Result:
    """What one request gets back; None for what it did not ask for.

    Attributes:
        logprobs: Tensor of the labels' shape, float32 (float64 for float64 models): ``logprobs[i]`` is the log-prob of
            ``labels[i]`` given the tokens up to and including position i; exactly 0 where the label is ignored.
        top_k: The likeliest next tokens at the request's positions ``at``.
        logits: (M, V) scores of the whole vocabulary at these positions, in the model's dtype.
        hidden_states: (M, H) final normalised hidden states at these positions, in the model's dtype.
    """

    logprobs: Tensor | None = None
    top_k: TopK | None = None
    logits: Tensor | None = None
    hidden_states: Tensor | None = None

    @classmethod
    def of(cls, outputs: Outputs) -> Result:
        """Return the result made of what the executor hands out."""
        top = None
        if outputs.top_logprobs is not None and outputs.top_ids is not None:
            top = TopK(logprobs=outputs.top_logprobs, ids=outputs.top_ids)
        return cls(logprobs=outputs.logprobs, top_k=top, logits=outputs.logits, hidden_states=outputs.hidden_states)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchStats:
    """Features, price and budget of a micro-batch; byte counts are ints.

    Attributes:
        requests: Requests in it.
        packed_rows, logical_tokens: Rows computed, and tokens of the requests they stand for.
        trained_tokens: Scored labels.
        passes: Forward passes it took (one per grad mode).
        required_bytes: Predicted peak of new device memory.
        predicted_peak_bytes: The same, with everything resident at admission.
        available_bytes, budget_bytes, resident_bytes: The budget reading it was admitted against.
    """

    requests: int
    packed_rows: int
    logical_tokens: int
    trained_tokens: int
    passes: int
    required_bytes: int
    predicted_peak_bytes: int
    available_bytes: int
    budget_bytes: int
    resident_bytes: int

    @classmethod
    def of(cls, works: Sequence[PassWork], num_requests: int, verdict: Admission) -> MicroBatchStats:
        """Return the statistics of admitted passes over ``num_requests`` requests, inactive ones included."""
        return cls(
            requests=num_requests,
            packed_rows=sum(work.batch.packed_rows for work in works),
            logical_tokens=sum(work.batch.logical_tokens for work in works),
            trained_tokens=sum(work.head.num_labels for work in works),
            passes=len(works),
            required_bytes=verdict.price.required_bytes,
            predicted_peak_bytes=verdict.predicted_peak_bytes,
            available_bytes=verdict.budget.available_bytes,
            budget_bytes=verdict.budget.budget_bytes,
            resident_bytes=verdict.budget.resident_bytes,
        )

    @property
    def sharing_ratio(self) -> float:
        """Logical tokens per packed row; 1.0 when nothing was computed."""
        return self.logical_tokens / self.packed_rows if self.packed_rows else 1.0


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class MicroBatch:
    """One micro-batch, its outputs alive and with graph.

    Attributes:
        inputs: The caller's nest of requests, without the leaves that are in other micro-batches.
        outputs: The same nest with a ``Result`` in place of each request.
        indices: Flat index of each leaf, in reading order.
        requests, results, coefficients: The leaves as flat lists aligned with ``indices``. ``coefficients[k]`` is the
            factor on request k's summed loss that makes the sum over all micro-batches the normalised loss.
        num_trained: Scored labels in the whole call, over all micro-batches.
        stats: Features, price, budget.
        split: The whole call's micro-batches as ranges: those that ran, this one, and those planned after it. Given
            back to ``forward_micro_batches`` with the same requests, they are repeated as they are.
        observed: Measured memory; filled in when the iteration goes on.
    """

    inputs: Any
    outputs: Any
    indices: tuple[int, ...]
    requests: tuple[Request, ...]
    results: tuple[Result, ...]
    coefficients: tuple[float, ...]
    num_trained: int
    stats: MicroBatchStats
    split: tuple[SplitPart, ...] = ()
    observed: Observation | None = field(default=None)

    def select(self, values: Sequence[T]) -> list[T]:
        """Return the entries of a flat list of the whole call that belong to this micro-batch."""
        return [values[index] for index in self.indices]
