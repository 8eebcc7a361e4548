"""Splits into passes and layouts for the exactness benchmark: all of them, or random ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from trainer_rank import Layout, Request
from trainer_rank.prefix import PrefixTree, build_tree, pack

MOST_DECISIONS, MOST_REQUESTS = 4, 6

Members = tuple[int, ...]
Pass = tuple[Members, Layout]
"""The requests of a pass, by index, and its layout."""


def is_small(batch: Sequence[Request]) -> bool:
    """Return whether every layout and every split can be run."""
    return len(batch) <= MOST_REQUESTS and _tree(batch, range(len(batch))).num_segments <= MOST_DECISIONS


def all_passes(batch: Sequence[Request], members: Members) -> tuple[list[Pass], int]:
    """Return the passes of ``members`` whose packed rows differ, and the number of layouts these stand for."""
    tree = _tree(batch, members)
    distinct: dict[tuple[bytes, ...], Pass] = {}
    for decisions in itertools.product((False, True), repeat=tree.num_segments):
        layout = Layout.mixed(decisions)
        packed = pack(tree, layout)
        table = (packed.token_ids, packed.segment_start, packed.segment_parent, packed.request_segment)
        distinct.setdefault(tuple(array.tobytes() for array in table), (members, layout))
    return list(distinct.values()), 2**tree.num_segments


def all_splits(members: Members) -> Iterator[list[Members]]:
    """Yield every partition of ``members``."""
    if not members:
        yield []
        return
    first, *rest = members
    for size in range(len(rest) + 1):
        for others in itertools.combinations(rest, size):
            for tail in all_splits(tuple(index for index in rest if index not in others)):
                yield [(first, *others), *tail]


def random_split(batch: Sequence[Request], draw: np.random.Generator) -> list[Pass]:
    """Return a random split into at most three passes with a random layout each."""
    owner = draw.integers(0, draw.integers(1, 4), len(batch))
    passes = []
    for number in np.unique(owner):
        members = tuple(np.flatnonzero(owner == number).tolist())
        share = draw.choice([0.0, 0.5, 0.8, 1.0])
        decisions = draw.random(_tree(batch, members).num_segments) < share
        passes.append((members, Layout.mixed(tuple(decisions.tolist()))))
    return passes


def _tree(batch: Sequence[Request], members: Sequence[int]) -> PrefixTree:
    return build_tree([batch[index].tokens for index in members])
