"""The ``profile`` pricer: bytes per packed row, learned as running maxima, and a fixed charge per logical token.

    required = floor(1.10 * (outputs + max(static, learned)))
    learned  = B * max(P, L / (8 r)) + 6 KiB * L + segments * state    where packed rows price a forward
             = B * max(P, L / r)                                        everywhere else
    static   = max(P * hidden * element * clamp(layers // 4 + 4, 4, 16), expert floor)
    retained = min(required, floor(1.10 * (outputs + R * P + 6 KiB * L)))          where packed rows price it
             = min(required, floor(1.10 * (outputs + R * max(P, L / r))))          elsewhere

P are packed rows, L logical tokens. B and R, the peak and the live bytes after the forward per row, the sharing ratio
r = L / P and the rows are what was observed of forwards of one signature, each the largest by itself. Nothing observed
leaves the static estimate, and retained = required. So it is outside the trust windows: L / P beyond 8 r, or P beyond
8 times the rows observed. B stays in force there: a price that fell at the edge of a window would make full sharing,
which has the fewest rows, dearer than less sharing, and a bound made of it would rule out what fits.

At a fixed L no term falls as P grows, so full sharing without segments bounds every layout from below.

All of it is exact: rates are fractions, and bytes are rounded once, at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import floor
from typing import Any, Final

from trainer_rank.memory.bounds import LowerBound, UpperBound
from trainer_rank.memory.price import Price, Term
from trainer_rank.units import KIB

SAFETY: Final = Fraction(110, 100)
LOGICAL_CHARGE: Final = 6 * KIB
"""Bytes per logical token for the head and the caller's loss: twelve blocks of 512 bytes."""

WINDOW: Final = 8
"""How far beyond the sharing ratio and the rows observed a profile is trusted."""

LABEL_BYTES: Final = 4
TOP_K_BYTES: Final = 12
SEGMENTS_PER_REQUEST: Final = 2
"""Segments a width probe assumes for each request: a prefix tree never has more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileModel:
    """What the pricer knows of a model.

    Attributes:
        num_layers, hidden_size, vocabulary_size: Geometry.
        element_size: Bytes of one element of the parameters' dtype.
        expert_bytes_per_row: From ``expert_floor.expert_bytes_per_row``.
        state_bytes: Bytes per segment with graph, from ``gated_delta_net_state_bytes``; 0 without such layers.
    """

    num_layers: int
    hidden_size: int
    vocabulary_size: int
    element_size: int
    expert_bytes_per_row: int = 0
    state_bytes: int = 0

    @property
    def static_bytes_per_row(self) -> int:
        """Bytes of the static estimate per packed row."""
        layers = min(max(self.num_layers // 4 + 4, 4), 16)
        return max(self.hidden_size * self.element_size * layers, self.expert_bytes_per_row)

    def output_bytes(
        self, *, labels: int = 0, top_k_entries: int = 0, logits_rows: int = 0, hidden_states_rows: int = 0
    ) -> int:
        """Return the bytes of everything handed to the caller."""
        row = self.vocabulary_size * logits_rows + self.hidden_size * hidden_states_rows
        return LABEL_BYTES * labels + TOP_K_BYTES * top_k_entries + self.element_size * row


def gated_delta_net_state_bytes(
    *,
    value_heads: int,
    key_heads: int,
    key_size: int,
    value_size: int,
    kernel: int,
    element_size: int,
) -> int:
    """Return the bytes of one gated-delta-net layer's states of a segment, the initial and the final one.

    Each is a float32 recurrent state (value_heads, key_size, value_size) and the history of a convolution over
    ``kernel`` positions. Backward runs one layer again at a time, so that one layer's are live.
    """
    recurrent = 4 * value_heads * key_size * value_size
    history = element_size * (2 * key_heads * key_size + value_heads * value_size) * (kernel - 1)
    return 2 * (recurrent + history)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardShape:
    """A forward as the pricer sees it.

    Attributes:
        packed_rows: P.
        logical_tokens: L, of the requests that are computed.
        output_bytes: From ``ProfileModel.output_bytes``.
        segments: Segments of the passes with graph.
        packed: Whether packed rows price it, from ``signature.packed_priced``.
    """

    packed_rows: int
    logical_tokens: int
    output_bytes: int = 0
    segments: int = 0
    packed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What forwards of one signature were observed to need, each number the largest so far.

    Attributes:
        peak_rate: B, bytes per packed row at the peak, outputs left out.
        retained_rate: R, those live after the forward; None when that was never measured.
        packed_rows: Rows.
        ratio: r, logical tokens per packed row.
    """

    peak_rate: Fraction
    retained_rate: Fraction | None
    packed_rows: int
    ratio: Fraction

    @classmethod
    def of(cls, shape: ForwardShape, *, peak_bytes: int, live_bytes: int | None) -> Profile:
        """Return what one forward teaches.

        Args:
            shape: The forward; it computed at least one row.
            peak_bytes: Its measured peak above what was resident before, outputs included.
            live_bytes: What was live of it after the forward, outputs included; None when not measured.
        """
        rows = shape.packed_rows
        return cls(
            peak_rate=Fraction(max(0, peak_bytes - shape.output_bytes), rows),
            retained_rate=None if live_bytes is None else Fraction(max(0, live_bytes - shape.output_bytes), rows),
            packed_rows=rows,
            ratio=Fraction(shape.logical_tokens, rows),
        )

    def join(self, other: Profile) -> Profile:
        """Return the larger of each number."""
        known = [rate for rate in (self.retained_rate, other.retained_rate) if rate is not None]
        return Profile(
            peak_rate=max(self.peak_rate, other.peak_rate),
            retained_rate=max(known, default=None),
            packed_rows=max(self.packed_rows, other.packed_rows),
            ratio=max(self.ratio, other.ratio),
        )

    def trusts(self, shape: ForwardShape) -> bool:
        """Return whether a forward lies in both trust windows."""
        return (
            shape.logical_tokens <= WINDOW * self.ratio * shape.packed_rows
            and shape.packed_rows <= WINDOW * self.packed_rows
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values; rates as [numerator, denominator]."""
        kept = self.retained_rate
        return {
            "peak_rate": list(self.peak_rate.as_integer_ratio()),
            "retained_rate": None if kept is None else list(kept.as_integer_ratio()),
            "packed_rows": self.packed_rows,
            "ratio": list(self.ratio.as_integer_ratio()),
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Profile:
        """Return the profile that ``to_json`` gave as ``values``."""
        kept = values["retained_rate"]
        return cls(
            peak_rate=Fraction(*values["peak_rate"]),
            retained_rate=None if kept is None else Fraction(*kept),
            packed_rows=values["packed_rows"],
            ratio=Fraction(*values["ratio"]),
        )


def price_forward(model: ProfileModel, shape: ForwardShape, profile: Profile | None) -> Price:
    """Return the price of a forward and its backward under what was learned, None for nothing."""
    terms = _terms(model, shape, profile)
    required = floor(SAFETY * sum(num_bytes for _, num_bytes in terms))
    shares = [Term(name=name, num_bytes=floor(num_bytes)) for name, num_bytes in terms if num_bytes]
    margin = required - sum(term.num_bytes for term in shares)
    return Price(
        required_bytes=required,
        retained_bytes=_retained_bytes(shape, profile, required),
        terms=(*shares, Term(name="margin of the profile", num_bytes=margin)),
        phase="whole pass",
    )


def required_at_least(model: ProfileModel, shape: ForwardShape, profile: Profile | None) -> LowerBound:
    """Return a bound on the required bytes of the same requests under any layout.

    Args:
        model: The model.
        shape: The requests under full sharing; its segments do not count, as another layout may have none of them.
        profile: What was learned.
    """
    return LowerBound(price_forward(model, replace(shape, segments=0), profile).required_bytes)


def retained_at_least(model: ProfileModel, shape: ForwardShape, profile: Profile | None) -> LowerBound:
    """Return a bound on the retained bytes of the same requests under any layout, likewise.

    The retained price under full sharing is none: full sharing can lie outside the trust windows, where retained is
    required, while a layout that shares less lies inside.
    """
    required = required_at_least(model, shape, profile).num_bytes
    if profile is None or profile.retained_rate is None:
        return LowerBound(required)
    return LowerBound(min(required, _retained_inside(shape, profile, profile.retained_rate)))


def width_probe(model: ProfileModel, shape: ForwardShape, requests: int, profile: Profile | None) -> UpperBound:
    """Return a bound on the required bytes of a forward whose rows are known but whose segments are not.

    It assumes two segments per request with graph. It may reject what the exact price admits, never the reverse.
    """
    probed = replace(shape, segments=SEGMENTS_PER_REQUEST * requests)
    return UpperBound(price_forward(model, probed, profile).required_bytes)


def _terms(model: ProfileModel, shape: ForwardShape, profile: Profile | None) -> list[tuple[str, Fraction | int]]:
    """Return the shares of a price by name, before the safety factor."""
    outputs = ("outputs", shape.output_bytes)
    static = shape.packed_rows * model.static_bytes_per_row
    if profile is None:
        return [outputs, ("static estimate", static)]
    reach = WINDOW * profile.ratio if shape.packed else profile.ratio
    rows = max(Fraction(shape.packed_rows), shape.logical_tokens / reach)
    learned = [("learned rows", profile.peak_rate * rows)]
    if shape.packed:
        learned.append(("head and caller per token", Fraction(LOGICAL_CHARGE * shape.logical_tokens)))
        learned.append(("recurrent states", Fraction(model.state_bytes * shape.segments)))
    if sum(num_bytes for _, num_bytes in learned) < static:
        return [outputs, ("static estimate", static)]
    return [outputs, *learned]


def _retained_bytes(shape: ForwardShape, profile: Profile | None, required: int) -> int:
    if profile is None or profile.retained_rate is None or not profile.trusts(shape):
        return required
    return min(required, _retained_inside(shape, profile, profile.retained_rate))


def _retained_inside(shape: ForwardShape, profile: Profile, rate: Fraction) -> int:
    if shape.packed:
        kept = rate * shape.packed_rows + LOGICAL_CHARGE * shape.logical_tokens
    else:
        kept = rate * max(Fraction(shape.packed_rows), shape.logical_tokens / profile.ratio)
    return floor(SAFETY * (shape.output_bytes + kept))
