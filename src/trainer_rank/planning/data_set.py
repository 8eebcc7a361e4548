"""A data set as a plan sees it: groups of requests, drawn so many at a time in an order nobody knows yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from trainer_rank.errors import ConfigError, TrainerRankMemoryError
from trainer_rank.planning.bound import GroupSize
from trainer_rank.planning.report import Refused
from trainer_rank.requests import Request
from trainer_rank.session import TrainerRank


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """Groups that stay together, of which each step takes the same number.

    Attributes:
        groups: Requests by group, at least one group.
        groups_per_step: Groups in a step.
        repeats: Whether a step may begin in one epoch and end in the next.
        lines: Line of each request in its file, group by group; empty when there is no file.
    """

    groups: Sequence[Sequence[Request]]
    groups_per_step: int
    repeats: bool = False
    lines: Sequence[int] = ()

    def __post_init__(self) -> None:
        if self.groups_per_step < 1:
            raise ConfigError(f"groups-per-step must be at least 1, got {self.groups_per_step}")
        if not self.groups or not all(self.groups):
            raise ConfigError("the data set must have at least one group, and no group may be empty")

    @cached_property
    def sizes(self) -> tuple[GroupSize, ...]:
        """The sizes of each group."""
        return tuple(map(GroupSize.of, self.groups))

    @cached_property
    def requests(self) -> list[Request]:
        """All requests, group by group."""
        return [request for group in self.groups for request in group]

    def heaviest_step(self) -> tuple[int, ...]:
        """Return the groups with the most rows, as many as make a step: one that can really be drawn."""
        numbers = range(len(self.groups))
        order = sorted(numbers, key=lambda number: (-self.sizes[number].rows, -self.sizes[number].labels, number))
        return tuple(order[: self.groups_per_step])

    def no_longer_than(self, longest: int) -> DataSet | None:
        """Return the data set without requests of more than so many tokens; None when nothing is left."""
        kept = [[one for one in group if one.num_tokens <= longest] for group in self.groups]
        groups = [group for group in kept if group]
        return replace(self, groups=groups, lines=()) if groups else None

    def distinct(self) -> list[tuple[int, Request]]:
        """Return one request of each length and number of trained tokens, with its position; the longest first.

        Alone, requests that agree in both need the same memory.
        """
        found: dict[tuple[int, int], tuple[int, Request]] = {}
        for number, request in enumerate(self.requests):
            if request.num_trained:
                found.setdefault((request.num_tokens, request.num_trained), (number, request))
        return [found[key] for key in sorted(found, reverse=True)]


def refused_alone(rank: TrainerRank, data: DataSet, cap: int | None) -> tuple[Refused, ...]:
    """Return the requests that cannot run alone, one of each kind; none means that every step fits, split or not."""
    try:
        rank.hardest(data.requests)
    except TrainerRankMemoryError:
        return tuple(_each_alone(rank, data, cap))
    return ()


def _each_alone(rank: TrainerRank, data: DataSet, cap: int | None) -> Iterator[Refused]:
    for number, request in data.distinct():
        (planned,) = rank.plan_alone([request])
        verdict = planned.admission
        if not verdict.admitted or planned.stats.packed_rows > (cap or planned.stats.packed_rows):
            line = data.lines[number] if data.lines else None
            yield Refused(request=number, line=line, tokens=request.num_tokens, short_bytes=verdict.short_bytes)
