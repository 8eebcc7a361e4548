"""What a plan says, as plain records. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

SCHEMA_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PassReport:
    """One planned micro-batch; bytes are predicted."""

    requests: int
    packed_rows: int
    logical_tokens: int
    head_rows: int
    required_bytes: int
    phase: str
    terms: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A change that was priced: what it is, and what the refused work needs before and after.

    Attributes:
        change: In words.
        before_bytes, after_bytes: Needed beyond what is resident.
        passes: Micro-batches of the step with the change.
    """

    change: str
    before_bytes: int
    after_bytes: int
    passes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """Whether a training step fits a device, in how many passes, what its peak is and what causes it.

    Attributes:
        model, device: What was planned for.
        options: The training options, as given.
        fits: The verdict.
        capacity_bytes: All the device offers.
        resident: Bytes by name that are there before any pass, context and reserve included.
        pending: Bytes by name that will come and stay: optimizer state, accumulated gradients.
        passes: In order of execution; empty when it does not fit.
        refusal: Why it does not fit, in words; None when it does.
        short_bytes: Bytes missing when it does not fit.
        peak_bytes: Largest predicted use of the device, everything included.
        fixes: Changes that make it fit, the smallest first, each priced.
    """

    model: str
    device: str
    options: dict[str, Any]
    fits: bool
    capacity_bytes: int
    resident: dict[str, int]
    pending: dict[str, int]
    passes: tuple[PassReport, ...]
    refusal: str | None
    short_bytes: int
    peak_bytes: int
    fixes: tuple[Fix, ...]

    @property
    def worst(self) -> PassReport | None:
        """The pass that needs most."""
        return max(self.passes, key=lambda one: one.required_bytes, default=None)

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}
