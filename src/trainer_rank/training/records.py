"""What a run says about itself: one frozen record per step, evaluation, comparison and run. Imports no torch.

Field names are the keys of the JSON lines in the run folder. Bytes are ints; ``None`` means not measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        step: 1-based.
        plan_gap: How far the packed rows may be above the least that any plan has, as a fraction; None for a step whose
            plan was repeated.
        skipped: Requests left out because they cannot fit; only with ``on_refuse: skip``.
        predicted_peak_bytes: Highest predicted peak of the step's passes; whole device, resident bytes included.
        observed_peak_bytes: The same as measured: resident bytes at admission plus the pass's measured peak above them.
        budget_bytes: All bytes the device may hold.
        loss: The normalised loss of the whole step.
        seconds: Wall time from planning to the end of the optimizer step.
        verify_difference: Largest absolute difference between a log-probability packed and alone; None in a step that
            is not verified.
        metrics: Figures beside the loss, by name, such as ``clip_fraction``; none for ``sft``.
    """

    step: int
    requests: int
    logical_tokens: int
    packed_rows: int
    sharing_ratio: float
    passes: int
    predicted_peak_bytes: int
    observed_peak_bytes: int | None
    budget_bytes: int
    trained_tokens: int
    trained_tokens_per_second: float
    loss: float
    grad_norm: float
    lr: float
    seconds: float
    verify_difference: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    skipped: int = 0
    plan_gap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """Mean negative log-probability of the trained tokens of the evaluation data, after ``step`` steps."""

    step: int
    requests: int
    trained_tokens: int
    loss: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRecord:
    """The same requests trained packed and one by one, on the spot.

    Attributes:
        packed_seconds, one_by_one_seconds: Planning, forward, loss and backward of all requests; the former is
            the mean of two runs.
        speed_up: one_by_one_seconds / packed_seconds.
        logprob_difference: Largest absolute difference of a log-probability.
        gradient_difference: Norm of the difference over the norm, of the worst trained parameter.
    """

    requests: int
    logical_tokens: int
    packed_rows: int
    packed_seconds: float
    one_by_one_seconds: float
    speed_up: float
    logprob_difference: float
    gradient_difference: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A finished run.

    Attributes:
        peak_resident_bytes: Peak resident set of the process over its whole life, loading the model included.
        budget_bytes: What it was promised to stay under.
        comparison: Packed against one by one, if it was asked for.
    """

    steps: int
    seconds: float
    packed_rows: int
    trained_tokens: int
    first_evaluation_loss: float | None
    last_evaluation_loss: float | None
    peak_resident_bytes: int
    budget_bytes: int
    comparison: ComparisonRecord | None
