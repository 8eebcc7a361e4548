"""What no plan of passes can fall below: packed rows and passes, from the tree and the capacity alone.

Every pass that computes anything below a node of the prefix tree computes the path to it, ``depth`` rows, and has room
for ``capacity - depth`` rows below it. So the rows below a node need that many passes, each of which computes the
segment above the node once. Bottom-up this bounds the rows of the whole tree, and thereby its passes.

Units in different children of a node share nothing below it. Those that take more than half the room each need a pass
of their own, which is more than the sum of rows tells.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trainer_rank.planner.sharing import Sharing


@dataclass(frozen=True, slots=True, kw_only=True)
class PassBound:
    """No plan whose passes keep to the capacity has fewer.

    Attributes:
        rows: Packed rows of all passes together.
        passes: Passes.
    """

    rows: int
    passes: int


@dataclass(slots=True)
class _Node:
    """An open node of the tree: rows below it at least, passes that meet it at least, its children's largest units."""

    depth: int
    rows: int = 0
    passes: int = 0
    deepest: list[int] = field(default_factory=list)


def bound_passes(units: Sharing, capacity: int) -> PassBound:
    """Return the bound for passes of at most ``capacity`` packed rows; a unit beyond it has a pass of its own."""
    path = [_Node(0)]
    before, alone = None, []
    for unit, length in enumerate(units.lengths):
        if length > capacity:
            alone.append(length)
            continue
        _close(path, 0 if before is None else units.common(before, unit), capacity)
        if path[-1].depth < length:
            path.append(_Node(length))
        before = unit
    _close(path, 0, capacity)
    together = 0 if before is None else _passes(path[0], capacity)
    return PassBound(rows=path[0].rows + sum(alone), passes=together + len(alone))


def _close(path: list[_Node], depth: int, capacity: int) -> None:
    """Close the nodes below ``depth``, each into the one above it."""
    while path[-1].depth > depth:
        node = path.pop()
        above = max(path[-1].depth, depth)
        passes = _passes(node, capacity)
        if path[-1].depth < above:
            path.append(_Node(above))
        parent = path[-1]
        parent.rows += node.rows + passes * (node.depth - above)
        parent.passes = max(parent.passes, passes)
        parent.deepest.append(max(node.deepest, default=node.depth))


def _passes(node: _Node, capacity: int) -> int:
    """Return the passes that meet a node at least."""
    room = capacity - node.depth
    # Without room, units that end here are all there is, and one pass computes them all.
    filled = -(-node.rows // room) if room else 1
    alone = sum(2 * (depth - node.depth) > room for depth in node.deepest)
    return max(1, filled, alone, node.passes)
