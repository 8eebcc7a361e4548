"""Small passes whose traces together show every kind of call and tell every feature apart.

Only shapes matter, so tokens are whatever makes siblings differ. Lengths are drawn from fixed seeds: generic numbers,
so that no two features are proportional over the passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from trainer_rank.planner import PassWork, pass_work
from trainer_rank.prefix import Layout
from trainer_rank.requests import IGNORED, Request

_NUM_COUNTING: Final = 8
_NUM_ROOTED: Final = 6
_NUM_FORESTS: Final = 5
_NUM_SINGLE: Final = 5

# Of sibling segments the first tokens differ; a vocabulary has at least so many.
_MOST_SIBLINGS: Final = 11


@dataclass(frozen=True, slots=True)
class _Node:
    """A segment of so many tokens and what continues it; a request ends at every leaf."""

    length: int
    children: tuple[_Node, ...] = ()


class SamplePasses:
    """Passes to trace for one grad mode and adapter.

    Args:
        no_grad, adapter: Of every request.
    """

    def __init__(self, *, no_grad: bool, adapter: str | None) -> None:
        self._no_grad = no_grad
        self._adapter = adapter
        self._draw = np.random.default_rng(20)

    def counting(self) -> Iterator[PassWork]:
        """Yield passes that tell the counts of a whole pass apart; one root each, with few calls."""
        for number in range(_NUM_COUNTING):
            # Short leaves of one length make a single call, so these passes, the only ones traced at two depths, are
            # quick to trace.
            leaves = (_Node(self._between(3, 15)),) * (2 + number % 4)
            yield self._pass(_Node(self._between(5, 700), leaves))

    def calls(self) -> Iterator[PassWork]:
        """Yield passes with every kind of call, several of each."""
        for _ in range(_NUM_ROOTED):
            yield self._pass(self._rooted())
        for _ in range(_NUM_FORESTS):
            yield self._pass(*self._forest())
        for number in range(_NUM_SINGLE):
            yield self._pass(_Node(self._between(4, 60) if number % 2 else self._between(100, 900)))

    def held_out(self) -> Iterator[PassWork]:
        """Yield passes to check an envelope against that had no part in making it."""
        draw = np.random.default_rng(21)
        self._draw = draw
        yield self._pass(*self._forest())
        yield self._pass(self._rooted())

    def _between(self, low: int, high: int) -> int:
        return int(self._draw.integers(low, high))

    def _leaves(self) -> list[_Node]:
        """Leaves of every kind of bucket: of each kind two that share a bucket, and one alone."""
        pair, alone = self._distinct(2, 8), self._distinct(9, 16)
        tile, other = self._distinct(2, 8)[:2]
        long, longer = self._between(70, 350), self._between(360, 600)
        return [
            _Node(pair[0]),
            _Node(pair[0]),
            _Node(long),
            _Node(long),
            _Node(8 * tile + self._between(1, 4)),
            _Node(8 * tile + self._between(4, 8)),
            _Node(alone[0]),
            _Node(8 * other + self._between(1, 8)),
            _Node(longer),
        ]

    def _rooted(self) -> _Node:
        """A root with nested runs and leaves of every kind."""
        first, second, third, *others = self._leaves()
        inner = _Node(self._between(20, 300), (first, second, third))
        outer = _Node(self._between(5, 90), (*others[:2], inner))
        return _Node(self._between(10, 600), (outer, *others[2:]))

    def _forest(self) -> tuple[_Node, ...]:
        """Two roots with leaves, and leaves that are roots, of every kind."""
        leaf = _Node(self._between(3, 7))
        first = _Node(self._between(20, 400), (leaf, _Node(self._between(8, 16))))
        second = _Node(self._between(5, 150), (leaf, _Node(self._between(66, 300))))
        return (first, second, *self._leaves())

    def _distinct(self, low: int, high: int) -> list[int]:
        """Return the lengths from ``low`` to ``high`` in random order."""
        order: list[int] = self._draw.permutation(np.arange(low, high)).tolist()
        return order

    def _pass(self, *roots: _Node) -> PassWork:
        requests = [self._request(row) for number, root in enumerate(roots) for row in _paths(root, number)]
        return pass_work(requests, range(len(requests)), Layout.full_sharing(), adapter=self._adapter)

    def _request(self, row: list[int]) -> Request:
        """Return a request that scores some of its tokens, some of them twice."""
        width = self._between(1, 4)
        labels = np.zeros((len(row), width) if width > 1 else len(row), dtype=np.int64)
        ignored = self._draw.random(labels.shape) < 0.25 + 0.5 * self._draw.random()
        labels[ignored] = IGNORED
        labels.flat[0] = 0
        return Request(tokens=np.array(row), labels=labels, no_grad=self._no_grad)


def _paths(node: _Node, number: int) -> Iterator[list[int]]:
    """Yield the tokens of each path below a node that is the ``number``-th of its siblings."""
    assert number < _MOST_SIBLINGS, "a vocabulary may have no more tokens"
    own = [number] * node.length
    if not node.children:
        yield own
    for child_number, child in enumerate(node.children):
        yield from (own + rest for rest in _paths(child, child_number))
