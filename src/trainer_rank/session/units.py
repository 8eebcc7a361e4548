"""The units a split may move: requests or atomic groups, in tree order, by what may share a pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trainer_rank.errors import RequestError
from trainer_rank.memory import ModelFacts
from trainer_rank.prefix import IntArray, Layout, build_tree, layout_rows
from trainer_rank.requests import BASE, Flat, Request

PassKey = tuple[bool, str]
"""Grad mode and adapter; only requests that agree in both may share a pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Flat indices that stay in one micro-batch.

    Attributes:
        indices: The flat indices.
        rows: Packed rows of its passes, under full sharing.
        shared_rows: Tokens its first request has in common with the first request of the unit before it: what is
            computed once when both are in one pass, and twice otherwise.
    """

    indices: tuple[int, ...]
    rows: int = 0
    shared_rows: int = 0


def check_requests(requests: Sequence[Request], facts: ModelFacts) -> None:
    """Raise ``RequestError`` for a request this model cannot run, naming it by its flat index."""
    for index, request in enumerate(requests):
        if request.num_tokens > facts.max_positions:
            raise RequestError(
                f"request {index}: tokens must not exceed the model's context of {facts.max_positions} positions, got "
                f"{request.num_tokens}; requests are never truncated, so shorten or drop it",
                field="tokens",
                index=index,
            )
        for field, values in (("tokens", request.tokens), ("labels", request.labels)):
            if values is not None and values.size and int(values.max()) >= facts.vocabulary_size:
                raise RequestError(
                    f"request {index}: {field} must lie below the vocabulary size {facts.vocabulary_size}, got "
                    f"{int(values.max())}; was it tokenised for another model?",
                    field=field,
                    index=index,
                )
        if request.top_k is not None and request.top_k > facts.vocabulary_size:
            raise RequestError(
                f"request {index}: top_k must not exceed the vocabulary size {facts.vocabulary_size}, got "
                f"{request.top_k}",
                field="top_k",
                index=index,
            )
        _check_adapter(request, index, facts)


def _check_adapter(request: Request, index: int, facts: ModelFacts) -> None:
    name = request.adapter
    if name is None:
        return
    if name not in facts.adapters:
        known = ", ".join(facts.adapters) if facts.adapters else "none, the model itself is trained"
        raise RequestError(
            f"request {index}: adapter must be one the runtime has ({known}), got {name!r}",
            field="adapter",
            index=index,
        )
    if name == BASE and not request.no_grad:
        raise RequestError(
            f"request {index}: adapter {BASE!r} is the frozen model, through which nothing is trained; set "
            "no_grad=True",
            field="adapter",
            index=index,
        )


def pass_key(request: Request, facts: ModelFacts) -> PassKey:
    """Return what a request must agree in with others to share a pass: grad mode and adapter.

    The runtime's own adapter goes by the empty name, whether a request gives its name or none.
    """
    return request.no_grad, "" if request.adapter in (None, facts.adapter) else str(request.adapter)


def plan_order(flat: Flat, facts: ModelFacts) -> list[list[Unit]]:
    """Return units grouped by the passes they need and, in each group, in depth-first order of their prefix tree.

    Neighbours in tree order share the longest prefixes. The order does not depend on the order of arrival, apart from
    exact duplicates and from atomic groups, which stand where their first member stands. Units that compute nothing
    come first.
    """
    leaves = flat.leaves
    computed = [index for index, request in enumerate(leaves) if request.computes]
    tree = build_tree([leaves[index].tokens for index in computed])
    rank = {index: int(tree.rank[number]) for number, index in enumerate(computed)}
    groups: dict[frozenset[PassKey], list[Unit]] = {}
    for indices in flat.groups:
        keys = frozenset(pass_key(leaves[index], facts) for index in indices if leaves[index].active)
        groups.setdefault(keys, []).append(Unit(indices=indices, rows=_rows(indices, leaves, facts)))

    def first_rank(unit: Unit) -> int:
        return min(rank.get(index, -1) for index in unit.indices)

    idle = groups.pop(frozenset(), [])
    ordered = [_with_shared_rows(sorted(units, key=first_rank), first_rank, tree.lcp) for units in groups.values()]
    if not ordered:
        return [idle] if idle else []
    # Inactive requests ride with the first micro-batch: they cost nothing and must be handed out once.
    ordered[0] = [*idle, *ordered[0]]
    return ordered


def _rows(indices: Sequence[int], leaves: Sequence[Request], facts: ModelFacts) -> int:
    """Return the packed rows of requests, pass by pass, under full sharing."""
    computed = [index for index in indices if leaves[index].computes]
    if len(computed) <= 1:
        return sum(leaves[index].num_tokens for index in computed)
    by_key: dict[PassKey, list[IntArray]] = {}
    for index in computed:
        by_key.setdefault(pass_key(leaves[index], facts), []).append(leaves[index].tokens)
    return sum(layout_rows(build_tree(rows), Layout.full_sharing()) for rows in by_key.values())


def _with_shared_rows(units: list[Unit], first_rank: Callable[[Unit], int], lcp: IntArray) -> list[Unit]:
    """Return the units with what each shares with the one before: the least common prefix on the way between them."""
    marked, before = [], -1
    for unit in units:
        here = first_rank(unit)
        shared = int(lcp[before + 1 : here + 1].min()) if 0 <= before < here else 0
        marked.append(replace(unit, shared_rows=shared))
        before = here
    return marked
