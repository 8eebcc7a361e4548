"""Trees, packing and layout choice the obvious way: one dictionary per token, recursion, exhaustive search.

The twins of ``tree``, ``pack`` and ``choose``, for tests and for reading. Fit for a few short rows only.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class NaiveSegment:
    """One segment of a radix tree: its tokens, the requests that end at its end, and its children by first token."""

    tokens: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    children: list[NaiveSegment] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class NaivePacked:
    """A packed batch as lists; ``request_rows`` holds the packed row of each token, by request index."""

    token_ids: list[int]
    positions: list[int]
    segments: list[tuple[int, int, int, int]]
    request_rows: dict[int, list[int]]


def naive_tree(rows: Sequence[Sequence[int]]) -> list[NaiveSegment]:
    """Return the roots of the radix tree of ``rows``, by first token."""
    return [_segment(token, node) for token, node in sorted(_trie(rows)[1].items())]


def naive_preorder(roots: Sequence[NaiveSegment]) -> list[NaiveSegment]:
    """Return all segments, each before its children."""
    listed: list[NaiveSegment] = []
    for root in roots:
        listed += [root, *naive_preorder(root.children)]
    return listed


def naive_pack(
    rows: Sequence[Sequence[int]], decisions: Sequence[bool], requests: Sequence[int] | None = None
) -> NaivePacked:
    """Return ``requests`` (default all) of ``rows`` packed; one decision per segment of the tree of all rows."""
    wanted = set(range(len(rows)) if requests is None else requests)
    roots = naive_tree(rows)
    share = {id(segment): decision for segment, decision in zip(naive_preorder(roots), decisions, strict=True)}
    packed = NaivePacked(token_ids=[], positions=[], segments=[], request_rows={})

    def emit(path_rows: list[int], tokens: list[int], parent: int) -> tuple[list[int], int]:
        start = len(packed.token_ids)
        packed.token_ids.extend(tokens)
        packed.positions.extend(range(len(path_rows), len(path_rows) + len(tokens)))
        packed.segments.append((start, start + len(tokens), parent, -1))
        return path_rows + list(range(start, start + len(tokens))), len(packed.segments) - 1

    def visit(segment: NaiveSegment, carried: list[int], path_rows: list[int], parent: int) -> None:
        ends = [request for request in segment.ends if request in wanted]
        children = [child for child in segment.children if _requests_below(child) & wanted]
        tokens = carried + segment.tokens
        if share[id(segment)] and len(ends) + len(children) > 1:
            path_rows, parent = emit(path_rows, tokens, parent)
            packed.request_rows.update(dict.fromkeys(ends, path_rows))
            tokens = []
        else:
            for request in ends:
                packed.request_rows[request] = emit(path_rows, tokens, parent)[0]
        for child in children:
            visit(child, tokens, path_rows, parent)

    for root in roots:
        if _requests_below(root) & wanted:
            visit(root, [], [], -1)
    for number, (start, stop, parent, _) in enumerate(packed.segments):
        last = max(packed.segments[other][1] for other in _descendants(packed.segments, number))
        packed.segments[number] = (start, stop, parent, last)
    return packed


def naive_choose_score(rows: Sequence[Sequence[int]], segment_cost_rows: int) -> int:
    """Return the least packed rows + ``segment_cost_rows`` * segments over every layout of the tree of ``rows``."""
    num_segments = len(naive_preorder(naive_tree(rows)))
    scores = []
    for decisions in itertools.product((True, False), repeat=num_segments):
        packed = naive_pack(rows, decisions)
        scores.append(len(packed.token_ids) + segment_cost_rows * len(packed.segments))
    return min(scores)


_Trie = tuple[list[int], dict[int, "_Trie"]]


def _trie(rows: Sequence[Sequence[int]]) -> _Trie:
    root: _Trie = ([], {})
    for request, row in enumerate(rows):
        node = root
        for token in row:
            node = node[1].setdefault(token, ([], {}))
        node[0].append(request)
    return root


def _segment(token: int, node: _Trie) -> NaiveSegment:
    tokens = [token]
    while not node[0] and len(node[1]) == 1:
        ((token, node),) = node[1].items()
        tokens.append(token)
    children = [_segment(first, child) for first, child in sorted(node[1].items())]
    return NaiveSegment(tokens=tokens, ends=node[0], children=children)


def _requests_below(segment: NaiveSegment) -> set[int]:
    return set(segment.ends).union(*(_requests_below(child) for child in segment.children))


def _descendants(segments: Sequence[tuple[int, int, int, int]], number: int) -> list[int]:
    """Return ``number`` and every segment whose chain of parents meets it."""
    found = []
    for other in range(len(segments)):
        above = other
        while above not in (-1, number):
            above = segments[above][2]
        if above == number:
            found.append(other)
    return found
