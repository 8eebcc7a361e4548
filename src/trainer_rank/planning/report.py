"""What a plan says, as plain records. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

SCHEMA_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PassReport:
    """One planned micro-batch; bytes are predicted.

    Attributes:
        requests, packed_rows, logical_tokens, head_rows, segments: What it computes.
        required_bytes: Peak of new memory, above what is resident.
        retained_bytes: Of it, what stays from the end of the forward to the backward.
        phase, layer: Where the peak falls.
        terms: Shares by name that sum to ``required_bytes``.
    """

    requests: int
    packed_rows: int
    logical_tokens: int
    head_rows: int
    segments: int
    required_bytes: int
    retained_bytes: int
    phase: str
    layer: int | None
    terms: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """The most that is live during one phase at one end of the layer stack, above what is resident.

    Attributes:
        phase, layer: Where; no layer outside the decoder.
        peak_bytes, end_bytes: Largest and last.
    """

    phase: str
    layer: int | None
    peak_bytes: int
    end_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """The prefix tree of a pass in depth-first order.

    Attributes:
        parent: Of each segment, -1 for a root.
        rows: Rows of each segment.
        ends: Requests that end at each segment.
    """

    parent: tuple[int, ...]
    rows: tuple[int, ...]
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A change that was priced: what it is, and what the device holds at the peak before and after.

    Attributes:
        change: In words.
        before_bytes, after_bytes: Largest predicted use of the device, everything included.
        passes: Micro-batches of the step with the change.
    """

    change: str
    before_bytes: int
    after_bytes: int
    passes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A request of a data set that cannot fit alone.

    Attributes:
        request: Its position, group by group.
        line: Its line in the file, if there is one.
        tokens, short_bytes: Its length, and the bytes missing.
    """

    request: int
    line: int | None
    tokens: int
    short_bytes: int

    @property
    def name(self) -> str:
        """What to call it."""
        return f"request {self.request}" if self.line is None else f"the request of line {self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSetReport:
    """What holds for every step of a data set, in whatever order its groups are drawn.

    Attributes:
        requests, groups, groups_per_step: The data set.
        longest_request: Tokens of its longest request.
        shapes: Distinct requests, by length and trained tokens, that were priced alone.
        refused: Requests that cannot fit alone. A step fits exactly when none of its requests is among them.
        heaviest_step: Positions of the groups whose step is planned in the report.
        worst_bytes: Device use that no pass of any step exceeds, everything included.
        worst_by: What sets that limit: ``sizes`` of the data set, or ``room`` on the device, where passes are split.
    """

    requests: int
    groups: int
    groups_per_step: int
    longest_request: int
    shapes: int
    refused: tuple[Refused, ...]
    heaviest_step: tuple[int, ...]
    worst_bytes: int
    worst_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """Whether a training step fits a device, in how many passes, what its peak is and what causes it.

    Attributes:
        model, device: What was planned for.
        options: The training options, as given.
        fits: The verdict.
        capacity_bytes: All the device offers.
        resident: Bytes by name that are there before any pass.
        reserve_bytes: Kept free for what nobody counts.
        pending: Bytes by name that will come and stay: optimizer state, accumulated gradients.
        passes: In order of execution; empty when it does not fit.
        worst: The pass that needs most; when it does not fit, the request that cannot run alone, if one is to blame.
        refusal: Why it does not fit, in words; None when it does.
        short_bytes: Bytes missing when it does not fit.
        peak_bytes: Largest predicted use of the device, everything included.
        fixes: Changes that make it fit, the cheapest first, each priced.
        timeline: Of the worst pass, above what is resident; empty when not asked for.
        tree: Of the worst pass; None when not asked for.
        data_set: What holds for all steps of a data set; None for a single step.
    """

    model: str
    device: str
    options: dict[str, Any]
    fits: bool
    capacity_bytes: int
    resident: dict[str, int]
    reserve_bytes: int
    pending: dict[str, int]
    passes: tuple[PassReport, ...]
    worst: PassReport | None
    refusal: str | None
    short_bytes: int
    peak_bytes: int
    fixes: tuple[Fix, ...] = ()
    timeline: tuple[Instant, ...] = ()
    tree: Tree | None = None
    data_set: DataSetReport | None = None

    @property
    def base_bytes(self) -> int:
        """What stands beside every pass: resident and pending bytes."""
        return sum(self.resident.values()) + sum(self.pending.values())

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}
