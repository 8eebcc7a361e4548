"""What a pass is, as far as its memory is concerned: a few integers, and the calls whose sizes matter one by one.

Most storages of a pass grow with a count of the whole pass: packed rows, head rows, labels. A few belong to one call at
a time, such as one run of the prefix tree in attention or one chunk of the head, and are gone before the next begins.
Their sizes do not add up; the largest call counts. They are kept as a list, from which calls that are nowhere larger
than another are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain
from operator import attrgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call whose temporaries depend on its own sizes.

    Attributes:
        kind: Which code runs: a kind of run in attention (``runtime.attention.calls``) or ``chunk`` of the head.
        rows: Query rows of attention, slots of a padded bucket, head rows of a chunk.
        keys: Key rows of attention, labels of a chunk.
        valid: Slots that are not padding.
        aligned_rows: Rows after the padding some kernels ask for.
        forward_scratch, backward_scratch: Bytes the kernel allocates inside.
    """

    kind: str
    rows: int = 0
    keys: int = 0
    valid: int = 0
    aligned_rows: int = 0
    forward_scratch: int = 0
    backward_scratch: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes, in the order of ``CALL_SIZES``."""
        found: tuple[int, ...] = _SIZES(self)
        return found


CALL_SIZES: Final = tuple(field.name for field in fields(Call) if field.name != "kind")
"""Names of a call's sizes."""

_SIZES: Final = attrgetter(*CALL_SIZES)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassFeatures:
    """Everything the memory of a pass depends on, tokens excluded.

    Attributes:
        packed_rows: P, rows the model computes.
        index_rows: Entries of the index tensors that attention gathers by.
        head_rows: R, rows that meet the vocabulary projection.
        labels: M, log-probs computed.
        output_elements: Elements of all outputs, ignored positions included.
        requests: Requests with outputs.
        logical_tokens: L, for what the caller's loss was declared to need.
        calls: The calls that matter: no call that is nowhere larger than another of its kind.
    """

    packed_rows: int
    index_rows: int
    head_rows: int
    labels: int
    output_elements: int
    requests: int
    logical_tokens: int
    calls: tuple[Call, ...] = ()

    @property
    def totals(self) -> tuple[int, ...]:
        """The counts of the whole pass, in the order of ``TOTALS``."""
        found: tuple[int, ...] = _TOTALS(self)
        return found


TOTALS: Final = tuple(field.name for field in fields(PassFeatures) if field.name != "calls")
"""Names of the counts of a whole pass."""

_TOTALS: Final = attrgetter(*TOTALS)


def call_sizes(calls: Sequence[Call]) -> NDArray[np.int64]:
    """Return (N, sizes) int64, the sizes of each call; much faster than a list of their ``sizes``."""
    flat = np.fromiter(chain.from_iterable(map(_SIZES, calls)), np.int64, len(calls) * len(CALL_SIZES))
    return flat.reshape(len(calls), len(CALL_SIZES))


def reaches(larger: PassFeatures, smaller: PassFeatures) -> bool:
    """Return whether a pass reaches another in every count and, call by call of a kind, in every size.

    By an envelope it then costs no less.
    """
    return all(a >= b for a, b in zip(larger.totals, smaller.totals, strict=True)) and all(
        any(
            other.kind == call.kind and all(a >= b for a, b in zip(other.sizes, call.sizes, strict=True))
            for other in larger.calls
        )
        for call in smaller.calls
    )


def largest_calls(calls: tuple[Call, ...]) -> tuple[Call, ...]:
    """Return the calls without those that another of their kind reaches in every size, by kind and then by size."""
    by_kind: dict[str, set[tuple[int, ...]]] = {}
    for call in calls:
        by_kind.setdefault(call.kind, set()).add(call.sizes)
    kept = []
    for kind, found in sorted(by_kind.items()):
        for sizes in _undominated(np.array(sorted(found, reverse=True), dtype=np.int64)).tolist():
            kept.append(Call(kind=kind, **dict(zip(CALL_SIZES, sizes, strict=True))))
    return tuple(kept)


def _undominated(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the distinct rows (N, D), in descending order, that no other row reaches in every column."""
    kept: list[int] = []
    for number, row in enumerate(rows):
        # A row that dominates this one sorts before it.
        if not any(np.all(rows[other] >= row) for other in kept):
            kept.append(number)
    return rows[kept]
