"""Tree shapes for the exactness benchmark: more than sixty, each drawn as nodes and turned into requests.

A node is a run of tokens, the number of requests that end after it, and its children. Sibling runs begin with different
tokens, so the canonical prefix tree of the requests has exactly the drawn segments.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer_rank.requests import IGNORED, Request

Tokens = NDArray[np.int64]
VOCABULARY = 200


@dataclass(frozen=True, slots=True)
class Node:
    """A run of ``tokens`` tokens after which ``ends`` requests end."""

    tokens: int
    ends: int
    children: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """A forest to be checked."""

    name: str
    roots: tuple[Node, ...]


def node(tokens: int, *children: Node, ends: int | None = None) -> Node:
    """Return a node; without ``ends`` one request ends at a leaf and none at a branch point."""
    return Node(tokens, (0 if children else 1) if ends is None else ends, children)


def flat(prompt: int, *lengths: int, ends: int = 0) -> Node:
    """Return one prompt with a completion of each length; ``ends`` requests are the prompt alone."""
    return node(prompt, *(node(length) for length in lengths), ends=ends)


def chain(*lengths: int) -> Node:
    """Return a conversation: each request is the one before it with more tokens."""
    first, *rest = lengths
    return node(first, chain(*rest), ends=1) if rest else node(first)


def regular(lengths: tuple[int, ...], branching: int) -> Node:
    """Return a tree in which every node of level i has ``lengths[i]`` tokens and ``branching`` children."""
    first, *rest = lengths
    return node(first, *(regular(tuple(rest), branching) for _ in range(branching)) if rest else ())


def comb(depth: int, spine: int, tooth: int) -> Node:
    """Return a spine with one short branch at every level."""
    below = node(spine) if depth == 1 else comb(depth - 1, spine, tooth)
    return node(spine, node(tooth), below)


def random_node(draw: np.random.Generator, depth: int) -> Node:
    """Return a ragged tree: half of the runs have at most three tokens, a tenth more than a bucket's longest leaf."""
    kind = draw.random()
    tokens = int(draw.integers(1, 4) if kind < 0.5 else draw.integers(4, 40) if kind < 0.9 else draw.integers(60, 90))
    count = int(draw.integers(0, 4)) if depth else 0
    children = [random_node(draw, depth - 1) for _ in range(count)]
    return node(tokens, *children, ends=int(draw.integers(0, 2)) if children else int(draw.integers(1, 3)))


def shapes() -> list[Shape]:
    """Return all shapes."""
    return [*_small(), *_large(), *_random()]


def _small() -> list[Shape]:
    """Shapes of at most four segments and six requests: all their layouts and splits are run."""
    drawn = {
        "one token": [node(1)],
        "one request": [node(9)],
        "unshared pair": [node(5), node(7)],
        "unshared, a one-token request": [node(1), node(6), node(20)],
        "only one-token requests": [node(1), node(1), node(1), node(1)],
        "one-token root": [flat(1, 1, 4)],
        "one-token root that is a request": [flat(1, 5, ends=1)],
        "pair": [flat(8, 5, 6)],
        "one-token completions": [flat(8, 1, 1)],
        "three ragged completions": [flat(6, 1, 9, 17)],
        "three equal completions": [flat(11, 4, 4, 4)],
        "duplicates only": [node(6, ends=3)],
        "duplicate completions": [node(6, node(4, ends=2), node(3))],
        "duplicates at two depths": [node(4, node(3, ends=2), ends=2)],
        "empty completion": [flat(8, 4, 5, ends=1)],
        "two empty completions": [flat(8, 4, 5, ends=2)],
        "conversation": [chain(4, 3, 2, 5)],
        "conversation of single tokens": [chain(1, 1, 1, 1)],
        "conversation with a long turn": [chain(10, 1, 70)],
        "ends inside a branch": [node(5, node(3, node(2), ends=1), node(4))],
        "padded bucket": [flat(10, 17, 19, 23)],
        "long completion beside a short one": [flat(20, 70, 5)],
        "long prompt": [flat(210, 3, 30)],
        "six requests": [node(3, node(2, ends=2), node(5, ends=2), node(1, ends=1), ends=1)],
        "pair beside an unshared request": [flat(7, 2, 3), node(6)],
    }
    return [Shape(name, tuple(roots)) for name, roots in drawn.items()]


def _large() -> list[Shape]:
    """Shapes with more layouts and splits than can be run."""
    drawn = {
        "sixteen equal completions": [flat(12, *[4] * 16)],
        "completions of 1 to 16 tokens": [flat(6, *range(1, 17))],
        "twenty one-token completions": [flat(5, *[1] * 20)],
        "all bucket lengths": [flat(9, 16, 17, 24, 25, 31, 32, 40, 63, 64, 65, 72)],
        "binary, depth 3": [regular((9, 5, 3, 2), 2)],
        "binary, single tokens": [regular((1, 1, 1, 1), 2)],
        "ternary, depth 2": [regular((10, 4, 6), 3)],
        "comb": [comb(8, 3, 2)],
        "comb of single tokens": [comb(9, 1, 1)],
        "comb of long runs": [comb(3, 66, 67)],
        "long conversation": [chain(*[5, 3, 8, 1, 12, 2, 7, 4])],
        "two conversations from one system prompt": [node(15, chain(4, 6, 3, 5), chain(5, 2, 8), ends=0)],
        "conversation with alternatives": [node(12, node(5), node(6, node(4), node(3, node(7), node(2)), ends=1))],
        "groups": [node(20, flat(8, 5, 6, 7), flat(9, 4, 4, 4), flat(3, 1, 2))],
        "groups with empty completions": [node(20, flat(8, 5, 6, ends=1), flat(9, 4, ends=2), ends=1)],
        "forest": [flat(5, 3, 4), flat(6, 2, 2, 2), node(9), chain(3, 4)],
        "eight unshared": [node(length) for length in (1, 2, 5, 8, 13, 17, 33, 65)],
        "many duplicates": [node(7, node(5, ends=4), node(3, ends=3), ends=2)],
        "prompt beyond a kernel block": [flat(800, 5, 40)],
        "long ragged completions": [flat(100, 90, 130, 70, 200)],
        "deep and narrow": [node(2, node(2, node(2, node(2, node(2, node(2, node(3), node(4)), ends=1)), ends=1)))],
    }
    return [Shape(name, tuple(roots)) for name, roots in drawn.items()]


def _random() -> list[Shape]:
    found: list[Shape] = []
    seed = 0
    while len(found) < 20:
        draw = np.random.default_rng(seed)
        shape = Shape(f"random {seed}", tuple(random_node(draw, 3) for _ in range(draw.integers(1, 3))))
        rows = token_rows(shape, draw)
        if 3 <= len(rows) <= 24 and sum(row.size for row in rows) <= 1500:
            found.append(shape)
        seed += 1
    return found


def token_rows(shape: Shape, draw: np.random.Generator) -> list[Tokens]:
    """Return the token rows of the shape's requests in random order."""
    rows: list[Tokens] = []

    def walk(nodes: tuple[Node, ...], above: Tokens) -> None:
        for item, first in zip(nodes, draw.permutation(VOCABULARY)[: len(nodes)], strict=True):
            tokens = draw.integers(0, VOCABULARY, item.tokens)
            tokens[0] = first
            path = np.concatenate([above, tokens])
            rows.extend([path] * item.ends)
            walk(item.children, path)

    walk(shape.roots, np.empty(0, dtype=np.int64))
    return [rows[index] for index in draw.permutation(len(rows))]


def requests(shape: Shape, draw: np.random.Generator) -> list[Request]:
    """Return the shape's requests: next-token and random labels, a fifth ignored, two per position on every third."""
    made = []
    for number, row in enumerate(token_rows(shape, draw)):
        labels = np.append(row[1:], draw.integers(0, VOCABULARY))
        if number % 3 == 2:
            labels = np.stack([labels, draw.integers(0, VOCABULARY, row.size)], axis=1)
        ignored = draw.random(labels.shape) < 0.2
        ignored.reshape(-1)[draw.integers(0, ignored.size)] = False
        made.append(Request(tokens=row, labels=np.where(ignored, IGNORED, labels)))
    return made
