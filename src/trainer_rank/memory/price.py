"""What a pass is predicted to need, and what it was observed to need. The two are different types on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A named share of a price."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Predicted new device memory of a pass, above what is resident at admission.

    Attributes:
        required_bytes: Peak over forward, head, loss, recompute and backward, caller included.
        retained_bytes: What stays allocated after the forward until backward.
        terms: Shares that sum to ``required_bytes``.
        phase: Phase in which the peak falls.
        layer: Layer in which it falls, if any.
    """

    required_bytes: int
    retained_bytes: int
    terms: tuple[Term, ...]
    phase: str
    layer: int | None = None

    def __post_init__(self) -> None:
        assert sum(term.num_bytes for term in self.terms) == self.required_bytes, "terms must sum to required_bytes"
        assert 0 <= self.retained_bytes <= self.required_bytes, "retained must lie in 0..required"

    @property
    def largest_term(self) -> Term:
        """The term with the most bytes."""
        return max(self.terms, key=lambda term: term.num_bytes)


def itemised(
    names: Sequence[str], shares: Sequence[int], *, retained_bytes: int, phase: str, layer: int | None
) -> Price:
    """Return a price from its shares by name; shares of nothing are left out."""
    terms = tuple(Term(name=name, num_bytes=share) for name, share in zip(names, shares, strict=True) if share)
    required = sum(shares)
    return Price(
        required_bytes=required,
        retained_bytes=min(required, retained_bytes),
        terms=terms or (Term(name=names[0], num_bytes=0),),
        phase=phase,
        layer=layer,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What one executed pass was measured to need, joined with what it was.

    Attributes:
        packed_rows, logical_tokens, head_rows, num_segments, num_requests: Features of the pass.
        peak_bytes: Measured peak of new device memory, above what was resident at admission.
        peak_resident_bytes: Measured peak of everything resident, where the device reports it.
        phase: Phase of the measured peak: ``forward`` (head included), ``loss`` (the caller's) or ``backward``.
        caller_bytes: Measured peak of what the caller's loss added before backward; None without a backward.
        retained_bytes: Measured new bytes still allocated after the forward; None when not measured.
    """

    packed_rows: int
    logical_tokens: int
    head_rows: int
    num_segments: int
    num_requests: int
    peak_bytes: int
    peak_resident_bytes: int | None
    phase: str = "forward"
    caller_bytes: int | None = None
    retained_bytes: int | None = None


def combine(prices: Sequence[Price], *, left_bytes: int = 0) -> Price:
    """Return the price of passes whose forwards run one after another and stay alive together.

    Their retained bytes add; on top comes the largest transient of any one of them. Instants are never summed.

    Args:
        prices: One per pass.
        left_bytes: What passes leave behind after their backward, whichever comes first: gradients.
    """
    if len(prices) == 1:
        return prices[0]
    retained = sum(price.retained_bytes for price in prices)
    worst = max(prices, key=lambda price: price.required_bytes - price.retained_bytes)
    kept = retained - worst.retained_bytes
    left = (Term(name="gradients of other passes", num_bytes=left_bytes),) if left_bytes else ()
    return Price(
        required_bytes=kept + worst.required_bytes + left_bytes,
        retained_bytes=retained,
        terms=(*worst.terms, Term(name="other passes kept alive", num_bytes=kept), *left),
        phase=worst.phase,
        layer=worst.layer,
    )
