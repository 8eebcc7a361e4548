"""One record per decision and one per observation, joined by ``decision``; plain values that go to JSON as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from trainer_rank.admission import Admission
from trainer_rank.memory import ModelFacts, Observation
from trainer_rank.planner import PassWork

SCHEMA: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRecord:
    """Everything a verdict was made of.

    Attributes:
        decision: Number of the decision within its rank.
        verdict: ``admitted`` or ``refused``.
        passes: Features of each pass: rows, tokens, segments, head rows, labels, grad mode, adapter, shape
            digest; how many of its layers are recomputed, None where the mode says it for all.
        recompute: Recompute mode the price holds for.
        pricing: Name of the pricer, and what it read and had learned when it made the price.
        terms: Bytes by name; they sum to ``charged_bytes``.
        phase, layer: Where the predicted peak falls.
    """

    decision: int
    verdict: str
    passes: list[dict[str, Any]]
    requests: list[int]
    recompute: str
    pricing: dict[str, Any]
    terms: dict[str, int]
    required_bytes: int
    retained_bytes: int
    charged_bytes: int
    phase: str
    layer: int | None
    budget: dict[str, int]
    facts: dict[str, Any]

    def as_line(self) -> dict[str, Any]:
        """Return the record as one JSON-able line."""
        return {"schema": SCHEMA, "kind": "admission", **asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationRecord:
    """What an admitted micro-batch was measured to need.

    Attributes:
        decision: The decision that admitted it.
        predicted_bytes: The required bytes it was admitted with.
        predicted_over_observed: Their ratio; None when nothing was allocated.
        seconds: From the start of the forward to the caller's return, loss and backward included.
    """

    decision: int
    observation: dict[str, Any]
    predicted_bytes: int
    predicted_over_observed: float | None
    seconds: float

    def as_line(self) -> dict[str, Any]:
        """Return the record as one JSON-able line."""
        return {"schema": SCHEMA, "kind": "observation", **asdict(self)}


Record = AdmissionRecord | ObservationRecord


def admission_record(
    number: int,
    works: Sequence[PassWork],
    verdict: Admission,
    *,
    recompute: str,
    facts: ModelFacts,
    pricing: Mapping[str, Any],
) -> AdmissionRecord:
    """Return the record of a verdict."""
    terms: dict[str, int] = {}
    for term in verdict.terms:
        terms[term.name] = terms.get(term.name, 0) + term.num_bytes
    return AdmissionRecord(
        decision=number,
        verdict="admitted" if verdict.admitted else "refused",
        passes=[_features(work) for work in works],
        requests=sorted(index for work in works for index in work.indices),
        recompute=recompute,
        pricing=dict(pricing),
        terms=terms,
        required_bytes=verdict.price.required_bytes,
        retained_bytes=verdict.price.retained_bytes,
        charged_bytes=verdict.charged_bytes,
        phase=verdict.price.phase,
        layer=verdict.price.layer,
        budget=asdict(verdict.budget),
        # Lists, as JSON has no tuples.
        facts={**asdict(facts), "adapters": list(facts.adapters)},
    )


def observation_record(
    number: int, observation: Observation, *, predicted_bytes: int, seconds: float
) -> ObservationRecord:
    """Return the record of an observation."""
    observed = observation.peak_bytes
    return ObservationRecord(
        decision=number,
        observation=asdict(observation),
        predicted_bytes=predicted_bytes,
        predicted_over_observed=predicted_bytes / observed if observed else None,
        seconds=seconds,
    )


def _features(work: PassWork) -> dict[str, Any]:
    return {
        "packed_rows": work.batch.packed_rows,
        "logical_tokens": work.batch.logical_tokens,
        "segments": work.batch.num_segments,
        "requests": len(work.indices),
        "head_rows": work.head.num_rows,
        "labels": work.head.num_labels,
        "recomputed": work.recomputed,
        "top_k": work.head.top.k,
        "top_k_rows": int(work.head.top.rows.size),
        "logits_rows": work.logits.num_rows,
        "hidden_states_rows": work.hidden.num_rows,
        "no_grad": work.no_grad,
        "adapter": work.adapter,
        "shape": work.shape_key,
    }
