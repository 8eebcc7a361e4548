"""What a data set is made of, in figures: sizes, sharing, duplicates, prefixes that nearly agree. Imports no torch.

    logical tokens      as if each request were computed alone
    packed rows         of the whole set as one prefix tree, and of each group as a tree of its own
    sharing ratio       logical by packed: how many times less is computed

A step of a run shares within its groups at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from trainer_rank.prefix import IntArray, PrefixTree, build_tree, first_divergences
from trainer_rank.training.rollouts import Rollout
from trainer_rank.training.schedule import group_rollouts

# Bars of the table of lengths; edges are rounded, so there may be fewer.
_MOST_BINS: Final = 12
# Tokens decoded before a divergence, and from it on.
_TOKENS_BEFORE: Final = 16
_TOKENS_AFTER: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Requests whose length is in ``[start, stop)`` tokens, and their tokens."""

    start: int
    stop: int
    requests: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NearPrefix:
    """Two lines that part over a few tokens and then agree again; sharing ends where they part.

    Attributes:
        line_a, line_b: Lines of the file.
        position: First token at which they differ, from 0.
        lost_rows: Tokens that agree again and are computed twice.
        before: Last tokens that both have.
        after_a, after_b: Tokens of each from the position on.
    """

    line_a: int
    line_b: int
    position: int
    lost_rows: int
    before: tuple[int, ...]
    after_a: tuple[int, ...]
    after_b: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSummary:
    """Figures of a data set of at least one request; tokens and rows are counts.

    Attributes:
        requests, groups: How many; a request without a group is a group of its own.
        min_length, median_length, p99_length, max_length: Tokens of a request; percentiles are lengths that occur.
        logical_tokens, packed_rows, packed_rows_by_group: See the module.
        trained_tokens: Tokens that are scored: those marked as trained that have a token before them.
        trains_nothing: Lines without a trained token, or with the weight 0.
        duplicates: Lines that repeat an earlier line's tokens, with that line.
        lengths: Requests by length, ascending.
        near_prefixes: The pairs that lose most rows, the worst first, and in all how many there are.
    """

    requests: int
    groups: int
    min_length: int
    median_length: int
    p99_length: int
    max_length: int
    logical_tokens: int
    packed_rows: int
    packed_rows_by_group: int
    trained_tokens: int
    trains_nothing: tuple[int, ...]
    duplicates: tuple[tuple[int, int], ...]
    lengths: tuple[Bin, ...]
    near_prefixes: tuple[NearPrefix, ...]
    num_near_prefixes: int

    @property
    def sharing_ratio(self) -> float:
        """Logical tokens by packed rows of the whole set."""
        return self.logical_tokens / self.packed_rows

    @property
    def sharing_ratio_by_group(self) -> float:
        """Logical tokens by packed rows, each group alone."""
        return self.logical_tokens / self.packed_rows_by_group


def summarise(rollouts: Sequence[Rollout], *, most_near_prefixes: int = 5) -> DataSummary:
    """Return the figures of ``rollouts``, at least one; of near prefixes, the ``most_near_prefixes`` worst."""
    if not rollouts:
        raise ValueError("a summary needs at least one request")
    groups = group_rollouts(rollouts)
    tree = _tree(rollouts)
    lengths = np.sort(tree.length)
    scored = [int(one.trained[1:].sum()) for one in rollouts]
    near = _near_prefixes(rollouts, tree)
    return DataSummary(
        requests=len(rollouts),
        groups=len(groups),
        min_length=int(lengths[0]),
        median_length=_percentile(lengths, 50),
        p99_length=_percentile(lengths, 99),
        max_length=int(lengths[-1]),
        logical_tokens=tree.logical_tokens,
        packed_rows=_packed_rows(tree),
        packed_rows_by_group=sum(_packed_rows(_tree(group)) for group in groups),
        trained_tokens=sum(scored),
        trains_nothing=tuple(
            one.line for one, count in zip(rollouts, scored, strict=True) if not count or not one.weight
        ),
        duplicates=_duplicates(rollouts, tree),
        lengths=_bins(lengths),
        near_prefixes=near[:most_near_prefixes],
        num_near_prefixes=len(near),
    )


def _tree(rollouts: Sequence[Rollout]) -> PrefixTree:
    return build_tree([one.tokens for one in rollouts])


def _packed_rows(tree: PrefixTree) -> int:
    return tree.packed_rows_of_range(0, tree.num_requests)


def _percentile(ascending: IntArray, percent: int) -> int:
    """Return the smallest length that at least so many per cent of the requests do not exceed."""
    return int(ascending[max(0, -(-len(ascending) * percent // 100) - 1)])


def _bins(ascending: IntArray) -> tuple[Bin, ...]:
    """Return bins of one width, a power of two, that cover all lengths; empty ones in between are kept."""
    low, high = int(ascending[0]), int(ascending[-1])
    width = 1
    while (high // width) - (low // width) + 1 > _MOST_BINS:
        width *= 2
    found = []
    for number in range(low // width, high // width + 1):
        first, last = np.searchsorted(ascending, [number * width, (number + 1) * width])
        tokens = int(ascending[first:last].sum())
        found.append(Bin(start=number * width, stop=(number + 1) * width, requests=int(last - first), tokens=tokens))
    return tuple(found)


def _duplicates(rollouts: Sequence[Rollout], tree: PrefixTree) -> tuple[tuple[int, int], ...]:
    """Return (line, earlier line) for every request whose tokens an earlier one has; equal ones have equal segments."""
    first: dict[int, int] = {}
    ends = tree.request_segment.tolist()
    return tuple(
        (rollout.line, earlier)
        for rollout, end in zip(rollouts, ends, strict=True)
        if (earlier := first.setdefault(end, rollout.line)) != rollout.line
    )


def _near_prefixes(rollouts: Sequence[Rollout], tree: PrefixTree) -> tuple[NearPrefix, ...]:
    found = []
    for one in first_divergences(tree):
        a, b = rollouts[one.request_a], rollouts[one.request_b]
        stop = one.position + _TOKENS_AFTER
        found.append(
            NearPrefix(
                line_a=a.line,
                line_b=b.line,
                position=one.position,
                lost_rows=one.lost_rows,
                before=tuple(a.tokens[max(0, one.position - _TOKENS_BEFORE) : one.position].tolist()),
                after_a=tuple(a.tokens[one.position : stop].tolist()),
                after_b=tuple(b.tokens[one.position : stop].tolist()),
            )
        )
    return tuple(sorted(found, key=lambda one: -one.lost_rows))
