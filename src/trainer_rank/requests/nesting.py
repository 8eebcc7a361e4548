"""Nests of requests: flattened on the way in, cut into micro-batches, restored on the way out.

A nest is a request, or a list, tuple, named tuple, dict or ``AtomicGroup`` of nests. Leaves are numbered in reading
order; that number is a request's *flat index* everywhere in the library.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainer_rank.errors import RequestError
from trainer_rank.requests.request import Request


class AtomicGroup(tuple[Any, ...]):
    """A group that a micro-batch never cuts, such as a preference pair: ``AtomicGroup([chosen, rejected])``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"AtomicGroup({list(self)!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """The leaves of a nest and the nest they came from.

    Attributes:
        nest: The caller's nest, untouched.
        leaves: Requests in reading order.
        groups: Flat indices that stay together, in order; a lone request is a group of one.
    """

    nest: Any
    leaves: tuple[Request, ...]
    groups: tuple[tuple[int, ...], ...]


def flatten(nest: Any) -> Flat:
    """Return the leaves of a nest.

    Raises:
        RequestError: Something in the nest is neither a request nor a container; the message says where.
    """
    if isinstance(nest, Iterator):
        nest = list(nest)
    leaves: list[Request] = []
    groups: list[tuple[int, ...]] = []
    _collect(nest, "requests", False, leaves, groups)
    return Flat(nest=nest, leaves=tuple(leaves), groups=tuple(groups))


def restore(nest: Any, values: Mapping[int, Any]) -> Any:
    """Return the nest with every leaf replaced by ``values[flat index]``; a KeyError means a leaf is missing."""
    return _rebuild(nest, lambda index, leaf: values[index], keep=lambda index: True)


def cut(nest: Any, values: Mapping[int, Any]) -> Any:
    """Return the nest with leaves replaced by ``values`` and leaves without a value left out.

    Containers that lose every leaf go with them, except the outermost. A named tuple that loses a field becomes a
    plain tuple, because its fields could no longer be told apart.
    """
    return _rebuild(nest, lambda index, leaf: values[index], keep=lambda index: index in values)


def _children(node: Any, path: str) -> list[tuple[Any, Any]]:
    if isinstance(node, Mapping):
        return list(node.items())
    if isinstance(node, list | tuple):
        return list(enumerate(node))
    raise RequestError(
        f"{path} must be a Request or a list, tuple, dict or AtomicGroup of them, got {type(node).__name__}",
        field="requests",
    )


_GONE = object()


# The two walks are module functions, not closures: a function that refers to itself is a cycle, and would keep every
# result, and the graph behind it, until the garbage collector next runs.
def _collect(node: Any, path: str, atomic: bool, leaves: list[Request], groups: list[tuple[int, ...]]) -> None:
    """Append the leaves of a node and the groups they form; inside an atomic group only the group itself is one."""
    if isinstance(node, Request):
        leaves.append(node)
        if not atomic:
            groups.append((len(leaves) - 1,))
        return
    begin, whole = len(leaves), isinstance(node, AtomicGroup)
    for key, child in _children(node, path):
        _collect(child, f"{path}[{key!r}]", atomic or whole, leaves, groups)
    if whole and not atomic and len(leaves) > begin:
        groups.append(tuple(range(begin, len(leaves))))


def _rebuild(nest: Any, value: Callable[[int, Request], Any], *, keep: Callable[[int], bool]) -> Any:
    result = _walk(nest, itertools.count(), value, keep, outermost=True)
    return [] if result is _GONE else result


def _walk(
    node: Any,
    numbers: Iterator[int],
    value: Callable[[int, Request], Any],
    keep: Callable[[int], bool],
    *,
    outermost: bool,
) -> Any:
    """Return the node rebuilt, ``_GONE`` when nothing of it is kept; ``numbers`` counts the leaves."""
    if isinstance(node, Request):
        index = next(numbers)
        return value(index, node) if keep(index) else _GONE
    pairs = [(key, _walk(child, numbers, value, keep, outermost=False)) for key, child in _children(node, "requests")]
    kept = [(key, child) for key, child in pairs if child is not _GONE]
    if pairs and not kept and not outermost:
        return _GONE
    return _like(node, kept, complete=len(kept) == len(pairs))


def _like(node: Any, kept: list[tuple[Any, Any]], *, complete: bool) -> Any:
    values = [child for _, child in kept]
    if isinstance(node, Mapping):
        return dict(kept)
    if isinstance(node, AtomicGroup):
        return AtomicGroup(values)
    if isinstance(node, tuple):
        return type(node)(*values) if complete and hasattr(node, "_fields") else tuple(values)
    return values
