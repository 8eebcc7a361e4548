"""What was learned of each signature, for one model on one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer_rank.memory.profile import ForwardShape, Profile
from trainer_rank.memory.signature import MemorySignature


class ProfileBook:
    """Profiles by signature; a plain mapping that only grows.

    Args:
        profiles: What is known already.
    """

    def __init__(self, profiles: Mapping[MemorySignature, Profile] | None = None) -> None:
        self._profiles = dict(profiles or {})

    def __len__(self) -> int:
        return len(self._profiles)

    def find(self, signature: MemorySignature) -> Profile | None:
        """Return what was learned of a signature; None for nothing."""
        return self._profiles.get(signature)

    def observe(
        self, signature: MemorySignature, shape: ForwardShape, *, peak_bytes: int, live_bytes: int | None
    ) -> None:
        """Learn from one executed forward; one that computed no row teaches nothing.

        Args:
            signature: Of the forward.
            shape: Its rows, tokens and outputs.
            peak_bytes: Measured peak of new memory, outputs included.
            live_bytes: What of it was live after the forward; None when not measured.
        """
        if not shape.packed_rows:
            return
        found = Profile.of(shape, peak_bytes=peak_bytes, live_bytes=live_bytes)
        known = self._profiles.get(signature)
        self._profiles[signature] = found if known is None else known.join(found)

    def to_json(self) -> list[dict[str, Any]]:
        """Return everything learned as plain values, the same for the same content."""
        rows = ({"signature": key.to_json(), "profile": one.to_json()} for key, one in self._profiles.items())
        return sorted(rows, key=lambda row: repr(row["signature"]))

    @classmethod
    def from_json(cls, rows: list[dict[str, Any]]) -> ProfileBook:
        """Return the book that ``to_json`` gave as ``rows``."""
        return cls({MemorySignature.from_json(row["signature"]): Profile.from_json(row["profile"]) for row in rows})
