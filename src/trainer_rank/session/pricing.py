"""What a rank asks of a pricer, whichever it is, and the pricer that takes pass by pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from trainer_rank.memory import LowerBound, ModelFacts, Observation, Price, combine
from trainer_rank.planner import PassWork
from trainer_rank.requests import Request

Pricing = Literal["envelope", "profile"]
"""``envelope`` prices by a trace of the code that will run, ``profile`` by learned bytes per packed row."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forward:
    """Requests that run together, pass by pass, before any of their graphs goes.

    Attributes:
        requests: The active ones.
        works: One pass per grad mode and adapter; empty when nothing is active.
    """

    requests: tuple[Request, ...]
    works: tuple[PassWork, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerAllowance:
    """What prices have room for of the caller's own loss.

    Attributes:
        bytes_per_token: Per logical token.
        rule: Where that is from, as a clause that the number completes.
        next_step: What to do about a loss that needs more.
    """

    bytes_per_token: int
    rule: str
    next_step: str


class Pricer(Protocol):
    """Prices forwards, and may learn from what they are observed to need."""

    grows_with_features: bool
    """Whether a request that reaches another in every feature costs no less."""

    tells_recompute: bool
    """Whether its prices depend on how many layers of a pass are recomputed."""

    def check_caller(self, bytes_per_token: int, *, source: str) -> None:
        """Raise ``ConfigError`` for a caller's loss the pricer does not support; ``source`` says where it is from."""

    def caller_allowance(self, declared: int) -> CallerAllowance:
        """Return what prices have room for of the caller's loss, of which ``declared`` bytes per token are known."""

    def price(self, forwards: Sequence[Forward]) -> Price:
        """Return the price of forwards that run one after another and stay alive together."""

    def at_least(self, forwards: Sequence[Sequence[Request]]) -> LowerBound | None:
        """Return a bound on the required bytes of forwards over these active requests, whatever their layout.

        It packs nothing. None when there is no bound worth having.
        """

    def begin(self) -> None:
        """A call begins: what was observed before it counts now. Prices within a call do not change."""

    def observe(self, forwards: Sequence[Forward], observation: Observation) -> None:
        """Take note of what executed forwards were measured to need."""

    def learned(self) -> dict[str, Any]:
        """Return everything learned as plain values, what the next call begins with included."""

    def load_learned(self, values: Mapping[str, Any]) -> None:
        """Go on from what ``learned`` returned; what another pricer learned is left alone."""

    def load_stored(self, values: Mapping[str, Any]) -> None:
        """Go on from what a store has of this pricer, by signature."""

    def news(self) -> dict[str, Any]:
        """Return what began to count since this was asked last, by signature, for a store; plain values."""

    def facts(self, forwards: Sequence[Forward]) -> dict[str, Any]:
        """Return what a price was made of beside the passes, as plain values for the record of a decision."""


class PassByPass:
    """Prices every pass by itself. Of passes alive together retained bytes add, with the largest transient on top.

    Args:
        price: Price of one pass.
        facts: The model.
    """

    grows_with_features = True
    tells_recompute = True

    def __init__(self, price: Callable[[PassWork], Price], facts: ModelFacts) -> None:
        self._price = price
        self._facts = facts

    def check_caller(self, bytes_per_token: int, *, source: str) -> None:
        pass

    def caller_allowance(self, declared: int) -> CallerAllowance:
        return CallerAllowance(
            bytes_per_token=declared,
            rule="caller_bytes_per_token is",
            next_step="Declare it, or have it found with rank.trace_loss(loss, example_requests)",
        )

    def price(self, forwards: Sequence[Forward]) -> Price:
        works = [work for forward in forwards for work in forward.works]
        return combine([self._price(work) for work in works], left_bytes=left_bytes(forwards, self._facts))

    def at_least(self, forwards: Sequence[Sequence[Request]]) -> LowerBound | None:
        # Less sharing has more rows, but also fewer runs of the tree and smaller indices: no layout bounds the others.
        return None

    def begin(self) -> None:
        pass

    def observe(self, forwards: Sequence[Forward], observation: Observation) -> None:
        pass

    def learned(self) -> dict[str, Any]:
        return {"name": "envelope"}

    def load_learned(self, values: Mapping[str, Any]) -> None:
        pass

    def load_stored(self, values: Mapping[str, Any]) -> None:
        pass

    def news(self) -> dict[str, Any]:
        return {}

    def facts(self, forwards: Sequence[Forward]) -> dict[str, Any]:
        return {"name": "envelope"}


def left_bytes(forwards: Sequence[Forward], facts: ModelFacts) -> int:
    """Return the gradients that a pass leaves behind for the passes whose backward comes after its own."""
    several = sum(not work.no_grad for forward in forwards for work in forward.works) > 1
    return facts.trainable_bytes if several else 0
