"""Near-identical prefixes: rows that part over a few tokens and then go on alike.

    row a   s y s t e m  X  h i s t o r y ...      one changed token (another tokenisation of the same text, a template
    row b   s y s t e m  Y  h i s t o r y ...      rendered again, a date) ends sharing for everything after it

Sharing stays exact: such rows are reported, never repaired, because different tokens have different probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainer_rank.prefix.order import IntArray
from trainer_rank.prefix.tree import PrefixTree


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Two requests that part and then agree again.

    Attributes:
        request_a, request_b: Request indices, in canonical order.
        position: First position at which they differ; all tokens before it are shared.
        token_a, token_b: The tokens there.
        changed_a, changed_b: Tokens of each until they agree again.
        lost_rows: Tokens equal after that, which sharing would have computed once.
    """

    request_a: int
    request_b: int
    position: int
    token_a: int
    token_b: int
    changed_a: int
    changed_b: int
    lost_rows: int


def first_divergences(
    tree: PrefixTree, *, min_shared: int = 16, max_changed: int = 8, min_resumed: int = 16
) -> tuple[Divergence, ...]:
    """Return the near-identical prefixes among canonical neighbours of ``tree``, in canonical order.

    Neighbours have the longest prefixes in common, so each place where the tree parts is looked at once per branch.

    Args:
        tree: The tree of the requests.
        min_shared: Tokens two rows must share before they part.
        max_changed: Most tokens of either row that may lie between parting and agreeing again; at least one lies there.
        min_resumed: Tokens that must then agree in a row.

    Raises:
        ValueError: ``min_shared`` is negative, or ``max_changed`` or ``min_resumed`` is below 1.
    """
    if min_shared < 0 or max_changed < 1 or min_resumed < 1:
        raise ValueError(
            "min_shared must be >= 0, max_changed and min_resumed >= 1, "
            f"got {min_shared}, {max_changed} and {min_resumed}"
        )
    found = []
    order, shared = tree.order.tolist(), tree.lcp.tolist()
    for rank in range(1, len(order)):
        position = shared[rank]
        if position < min_shared:
            continue
        a, b = order[rank - 1], order[rank]
        tail_a, tail_b = tree.rows[a][position:], tree.rows[b][position:]
        changed = _resume(tail_a, tail_b, max_changed, min_resumed)
        if changed is None:
            continue
        rest_a, rest_b = tail_a[changed[0] :], tail_b[changed[1] :]
        common = min(rest_a.size, rest_b.size)
        found.append(
            Divergence(
                request_a=a,
                request_b=b,
                position=position,
                token_a=int(tail_a[0]),
                token_b=int(tail_b[0]),
                changed_a=changed[0],
                changed_b=changed[1],
                lost_rows=int(np.count_nonzero(rest_a[:common] == rest_b[:common])),
            )
        )
    return tuple(found)


def _resume(tail_a: IntArray, tail_b: IntArray, max_changed: int, min_resumed: int) -> tuple[int, int] | None:
    """Return how many tokens to skip in each tail so that the next ``min_resumed`` agree, or None; fewest in all first.

    At least one token is skipped in all: the tails differ in their first token.
    """
    window = max_changed + min_resumed
    a, b = tail_a[:window].tolist(), tail_b[:window].tolist()
    for total in range(1, 2 * max_changed + 1):
        for skip_a in range(max(0, total - max_changed), min(total, max_changed) + 1):
            skip_b = total - skip_a
            run_a = a[skip_a : skip_a + min_resumed]
            if len(run_a) == min_resumed and run_a == b[skip_b : skip_b + min_resumed]:
                return skip_a, skip_b
    return None
