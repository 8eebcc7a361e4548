"""One pass as it was predicted and as it was observed, and what two of them are as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

_LARGEST: Final = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One pass as it was predicted and as it was observed, together; or several, joined.

    Attributes:
        packed_rows, logical_tokens: Its size; of several, the least.
        predicted_bytes: Price without anything learned; of several, the least.
        peak_bytes: Measured peak of new memory; of several, the most.
        settled_bytes: What of the difference of those two says nothing about the price: it is only between passes that
            were joined, or follows from other observations.
    """

    packed_rows: int
    logical_tokens: int
    predicted_bytes: int
    peak_bytes: int
    settled_bytes: int = 0

    @property
    def size(self) -> tuple[int, int, int]:
        """Rows, tokens and price."""
        return self.packed_rows, self.logical_tokens, self.predicted_bytes

    @property
    def values(self) -> list[int]:
        """Its fields as plain values, in order; the last only where it is not 0."""
        plain = [self.packed_rows, self.logical_tokens, self.predicted_bytes, self.peak_bytes]
        return [*plain, self.settled_bytes] if self.settled_bytes else plain

    @property
    def missing_bytes(self) -> int:
        """What the price was short of; negative when it was more than enough. Of several, the most."""
        return self.peak_bytes - self.predicted_bytes - self.settled_bytes

    def settle(self) -> Seen:
        """Return the observation without what its price was short of, for which others answer."""
        return replace(self, settled_bytes=self.peak_bytes - self.predicted_bytes) if self.missing_bytes > 0 else self

    def join(self, other: Seen) -> Seen:
        """Return one observation for two.

        Nothing false follows from it: a function that grows with size and covers it covers both, and what is no smaller
        than either is no smaller than it. What is lost is sharpness: one may be charged what the other needed.
        """
        predicted = min(self.predicted_bytes, other.predicted_bytes)
        peak = max(self.peak_bytes, other.peak_bytes)
        return Seen(
            packed_rows=min(self.packed_rows, other.packed_rows),
            logical_tokens=min(self.logical_tokens, other.logical_tokens),
            predicted_bytes=predicted,
            peak_bytes=peak,
            settled_bytes=peak - predicted - max(self.missing_bytes, other.missing_bytes),
        )

    @classmethod
    def of(cls, values: Sequence[Any]) -> Seen:
        """Return the observation with these ``values``.

        Raises:
            ValueError: They are not four or five whole numbers that an observation can have.
        """
        whole = all(type(value) is int and 0 <= value <= _LARGEST for value in values)
        if not whole or not 4 <= len(values) <= 5:
            raise ValueError(f"an observation must be 4 or 5 whole numbers from 0 to {_LARGEST}, got {values!r}")
        rows, tokens, predicted, peak, *settled = values
        return cls(
            packed_rows=rows, logical_tokens=tokens, predicted_bytes=predicted, peak_bytes=peak,
            settled_bytes=settled[0] if settled else 0,
        )  # fmt: skip
