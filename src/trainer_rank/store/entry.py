"""What one pricer learned of one kind of pass, as it goes into a store, out of it, and from one to another."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from trainer_rank.errors import StoreError
from trainer_rank.memory import Profile, Seen
from trainer_rank.memory.keep import keep


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What one pricer learned of one signature in one environment.

    Attributes:
        environment: Digest of ``facts``.
        facts: Model, device and versions, as plain values.
        pricer: ``envelope`` or ``profile``, or ``speed``.
        signature: What passes have in common, as JSON text.
        value: What was learned, as plain values; the pricer's own.
        observations: Observations it was learned from.
        written_at: Seconds since 1970 by the clock of the process that wrote it last.
    """

    environment: str
    facts: Mapping[str, Any]
    pricer: str
    signature: str
    value: Any
    observations: int
    written_at: float

    def to_json(self) -> dict[str, Any]:
        """Return the entry as plain values."""
        return {
            "facts": dict(self.facts),
            "pricer": self.pricer,
            "signature": self.signature,
            "value": self.value,
            "observations": self.observations,
            "written_at": self.written_at,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Entry:
        """Return the entry that ``to_json`` gave as ``values``.

        Raises:
            StoreError: A field is missing or is not what it must be.
        """
        try:
            merged = MERGES[values["pricer"]](None, values["value"])
            facts = dict(values["facts"])
            json.loads(values["signature"] or "{}")
            written_at, observations = float(values["written_at"]), int(values["observations"])
            if not math.isfinite(written_at) or observations < 0:
                raise ValueError(f"written_at {written_at}, observations {observations}")
            return cls(
                environment=digest_of(facts), facts=facts, pricer=values["pricer"], signature=values["signature"],
                value=merged, observations=observations, written_at=written_at,
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise StoreError(f"an entry is malformed ({error!r}); export the store again with this version") from error


def text_of(facts: Mapping[str, Any]) -> str:
    """Return an environment as text, the same for the same facts."""
    return json.dumps(facts, sort_keys=True, default=str)


def digest_of(facts: Mapping[str, Any]) -> str:
    """Return the digest of an environment."""
    return digest_of_text(text_of(facts))


def digest_of_text(text: str) -> str:
    """Return 16 hexadecimal digits that differ for different texts."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _merge_residuals(known: Any, more: Any) -> list[list[int]]:
    return [one.values for one in keep([Seen.of(one) for one in known or []], [Seen.of(one) for one in more])]


def _merge_profiles(known: Any, more: Any) -> dict[str, Any]:
    found = Profile.from_json(more)
    return (found if known is None else Profile.from_json(known).join(found)).to_json()


def _latest(known: Any, more: Any) -> Any:
    return dict(more)


SPEED: Final = "speed"
"""What stands for a pricer where speed is kept, under an empty signature: the latest measurement counts."""

MERGES: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "envelope": _merge_residuals, "profile": _merge_profiles, SPEED: _latest,
}  # fmt: skip
"""How what a pricer learned is put together from two processes: ``merge(known or None, more)``."""
