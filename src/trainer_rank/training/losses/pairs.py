"""Whether the preference pairs of a data file are whole. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer_rank.errors import DataError
from trainer_rank.training.rollouts import Rollout


def check_pairs(rollouts: Sequence[Rollout], path: Path) -> None:
    """Check that every pair of a file has one chosen and one rejected member that can be compared.

    Raises:
        DataError: A line names neither pair nor group, or a pair lacks a member, has two of a kind, differs in
            weight, or trains tokens of one member only. Names the pair and its lines.
    """
    members: dict[tuple[str, str | None], list[Rollout]] = {}
    for rollout in rollouts:
        if rollout.group is None:
            raise DataError(
                "pair: is required by the loss 'dpo', or a group of two; give both members of a pair the same name",
                path=path,
                line=rollout.line,
            )
        members.setdefault((rollout.group, rollout.pair), []).append(rollout)
    for (group, pair), both in members.items():
        name = group if pair is None else pair
        lines = ", ".join(str(one.line) for one in both)
        chosen = sum(bool(one.chosen) for one in both)
        if len(both) != 2 or chosen != 1:
            raise DataError(
                f"pair {name!r} must have one chosen and one rejected member, got {chosen} chosen and "
                f"{len(both) - chosen} rejected in lines {lines}; several pairs of one group need a field pair each",
                path=path,
                line=both[0].line,
            )
        if both[0].weight != both[1].weight:
            raise DataError(
                f"weight: must be the same for both members of pair {name!r}, got {both[0].weight} and "
                f"{both[1].weight} in lines {lines}",
                path=path,
                line=both[0].line,
            )
        # Token 0 has no position that predicts it.
        trained = [bool(one.trained[1:].any()) for one in both]
        if trained[0] != trained[1]:
            raise DataError(
                f"trained: must have a 1 in both members of pair {name!r} or in none, got lines {lines}",
                path=path,
                line=both[trained.index(False)].line,
            )
