"""Canonical order of token rows, and how much each row shares with the row before it.

Rows sort token by token, a row before its extensions, equal rows by request index. The order therefore depends on the
tokens alone, never on arrival, and everything a prefix tree needs follows from adjacent rows.

Rows are told apart block by block: requests that agree so far are grouped by the bytes of their next block, and only
groups of several go on, with a block twice as long. So no Python code runs per token, a token is read at most once more
than the check of its row reads it, and memory grows with the distinct blocks, not with the tokens. Token ids are
non-negative, so big-endian bytes sort as the numbers do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from trainer_rank.errors import RequestError

IntArray: TypeAlias = npt.NDArray[np.int64]

_FIRST_BLOCK: Final = 256
_KEY_WIDTHS: Final = (np.dtype(">u2"), np.dtype(">u4"), np.dtype(">u8"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CanonicalOrder:
    """Requests by canonical rank.

    Attributes:
        order: (N,) int64, request index at each rank.
        length: (N,) int64, tokens of each request, by request index.
        lcp: (N,) int64, tokens that ranks k - 1 and k have in common at their start; ``lcp[0]`` is 0.
    """

    order: IntArray
    length: IntArray
    lcp: IntArray


def canonical_order(rows: Sequence[IntArray]) -> CanonicalOrder:
    """Return the canonical order of ``rows``, each an int64 array (T,) of non-negative token ids with T >= 1.

    Raises:
        RequestError: A row is empty, not one-dimensional, not int64, or holds a negative token id.
    """
    largest = 0
    for index, row in enumerate(rows):
        largest = max(largest, _largest_token(row, index))
    width = next(dtype for dtype in _KEY_WIDTHS if largest <= np.iinfo(dtype).max)
    order: list[int] = []
    lcp: list[int] = []
    pending = (
        [_Group(requests=list(range(len(rows))), depth=0, block=_FIRST_BLOCK, lcp=0, at_end=False)] if rows else []
    )
    while pending:
        group = pending.pop()
        if len(group.requests) == 1 or group.at_end:
            order += group.requests
            lcp.append(group.lcp)
            lcp += [group.depth] * (len(group.requests) - 1)
        else:
            # Last in, first out: the smallest group is taken up next.
            pending += reversed(_split(group, rows, width))
    return CanonicalOrder(
        order=np.array(order, dtype=np.int64),
        length=np.array([row.size for row in rows], dtype=np.int64),
        lcp=np.array(lcp, dtype=np.int64),
    )


@dataclass(frozen=True, slots=True)
class _Group:
    """Requests, by index, that agree on their first ``depth`` tokens.

    ``lcp`` is what the first of them shares with the request before it in canonical order; ``at_end`` says that all of
    them end at ``depth``, so they are duplicates.
    """

    requests: list[int]
    depth: int
    block: int
    lcp: int
    at_end: bool


def _split(group: _Group, rows: Sequence[IntArray], width: np.dtype[np.unsignedinteger]) -> list[_Group]:
    """Return the groups of ``group`` by the next block of tokens, in canonical order."""
    start, stop = group.depth, group.depth + group.block
    members: dict[bytes, list[int]] = {}
    for request in group.requests:
        members.setdefault(rows[request][start:stop].astype(width).tobytes(), []).append(request)
    # Equality does not depend on byte order, and native words compare faster.
    native = width.newbyteorder("=")
    groups: list[_Group] = []
    previous: npt.NDArray[np.generic] = np.empty(0, dtype=native)
    for key in sorted(members):
        current = np.frombuffer(key, dtype=native)
        lcp = start + common_prefix(previous, current) if groups else group.lcp
        groups.append(_Group(members[key], start + current.size, 2 * group.block, lcp, current.size < group.block))
        previous = current
    return groups


def common_prefix(a: npt.NDArray[np.generic], b: npt.NDArray[np.generic]) -> int:
    """Return how many leading tokens ``a`` (T,) and ``b`` (U,) have in common."""
    shorter = min(a.size, b.size)
    if shorter == 0:
        return 0
    differs = a[:shorter] != b[:shorter]
    first = int(differs.argmax())
    return first if differs[first] else shorter


def _largest_token(row: IntArray, index: int) -> int:
    if not isinstance(row, np.ndarray) or row.dtype != np.int64 or row.ndim != 1:
        found = f"{row.dtype} array {row.shape}" if isinstance(row, np.ndarray) else type(row).__name__
        raise RequestError(
            f"request {index}: tokens must be a one-dimensional int64 array, got {found}. "
            "Convert with np.asarray(tokens, dtype=np.int64).",
            field="tokens",
            index=index,
        )
    if row.size == 0:
        raise RequestError(
            f"request {index}: tokens must hold at least one token, got 0. Drop the request or give it a token.",
            field="tokens",
            index=index,
        )
    # Read as unsigned, a negative id is at least 2**63: one pass checks both ends.
    largest = int(row.view(np.uint64).max())
    if largest >= 2**63:
        raise RequestError(
            f"request {index}: tokens must be >= 0, got {int(row.min())}. "
            "Labels may be negative to be ignored, tokens may not: replace padding ids before building the request.",
            field="tokens",
            index=index,
        )
    return largest
