"""What was learned beside the prices of each kind of pass, for one model on one device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer_rank.memory.residual import Residual
from trainer_rank.memory.seen import Seen


class ResidualBook:
    """Residuals by signature.

    Args:
        residuals: What is known already.
    """

    def __init__(self, residuals: Mapping[str, Residual] | None = None) -> None:
        self._residuals = dict(residuals or {})

    def __len__(self) -> int:
        return len(self._residuals)

    def find(self, signature: str) -> Residual | None:
        """Return what was learned of a signature; None for nothing."""
        return self._residuals.get(signature)

    def observe(self, signature: str, seen: Iterable[Seen]) -> None:
        """Learn from executed passes of one signature."""
        self._residuals[signature] = self._residuals.get(signature, Residual()).observe(*seen)

    def to_json(self) -> dict[str, list[list[int]]]:
        """Return everything learned as plain values, the same for the same content."""
        return {signature: self._residuals[signature].to_json() for signature in sorted(self._residuals)}

    @classmethod
    def from_json(cls, values: Mapping[str, Sequence[Any]]) -> ResidualBook:
        """Return the book that ``to_json`` gave as ``values``."""
        return cls({signature: Residual.from_json(seen) for signature, seen in values.items()})
