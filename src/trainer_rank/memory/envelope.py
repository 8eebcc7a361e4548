"""The price of a pass as the largest of a few affine functions of its features.

At any one instant of a pass the live bytes are affine in its features ``x``, so the peak is

    required(x) = max over pieces i of  a_i . x        (x begins with a constant 1)

with non-negative coefficients: convex, and monotone in every feature. Whatever is true of the features is true of the
price: features that no pass of a set falls below give a lower bound, and features that none exceeds an upper bound. A
piece inside a call (``features.Call``) has coefficients for the sizes of that call beside those of the whole pass and
counts once for each call of its kind.

Where the coefficients come from: ``memory.solve``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainer_rank.errors import EnvelopeError
from trainer_rank.memory.bounds import LowerBound, UpperBound
from trainer_rank.memory.features import CALL_SIZES, TOTALS, PassFeatures, call_sizes
from trainer_rank.memory.price import Price, itemised

COLUMNS = ("one", *TOTALS, *CALL_SIZES)
"""What the coefficients multiply."""

CALLER_PHASES = ("loss", "backward", "recompute")
"""Phases during which the caller's loss is alive."""

_NUM_TOTALS = 1 + len(TOTALS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """One affine piece.

    Attributes:
        phase: Phase it lies in.
        layer: Decoder layer it lies in, None outside layers.
        call: Kind of the call it lies in, empty outside calls.
        terms: (categories, columns) int64, bytes per unit of each column, by category; never negative.
    """

    phase: str
    layer: int | None
    call: str
    terms: NDArray[np.int64]

    @property
    def total(self) -> NDArray[np.int64]:
        """(columns,) bytes per unit of each column."""
        total: NDArray[np.int64] = self.terms.sum(0)
        return total


@dataclass(frozen=True, kw_only=True, eq=False)
class Envelope:
    """What passes of one signature cost: one model, one recompute mode, with or without gradients.

    Attributes:
        categories: Names of the terms, in the order of the pieces' rows.
        pieces: One per instant that can be the peak, none of them nowhere larger than another.
        retained: (columns,) int64: bytes kept from the end of the forward to the backward.
    """

    categories: tuple[str, ...]
    pieces: tuple[Piece, ...]
    retained: NDArray[np.int64]

    def covers(self, features: PassFeatures) -> bool:
        """Return whether every kind of call of the pass is known here."""
        return all(call.kind in self._by_call for call in features.calls)

    def price(self, features: PassFeatures) -> Price:
        """Return the price of a pass.

        Raises:
            EnvelopeError: The pass makes a kind of call that was never traced.
        """
        whole = np.array([1, *features.totals, *(0,) * len(CALL_SIZES)], dtype=np.int64)
        best, number, row = -1, 0, whole
        for kind, sizes in self._rows(features):
            numbers, matrix = self._of(kind)
            one = whole.copy()
            one[_NUM_TOTALS:] = sizes
            found = matrix @ one
            if found.max() > best:
                best, number, row = int(found.max()), numbers[int(found.argmax())], one
        best_piece = self.pieces[number]
        return itemised(
            self.categories,
            (best_piece.terms @ row).tolist(),
            retained_bytes=int(self.retained @ whole),
            phase=best_piece.phase,
            layer=best_piece.layer,
        )

    def required_bytes(self, candidates: Sequence[PassFeatures]) -> NDArray[np.int64]:
        """Return (N,) int64, ``price(...).required_bytes`` of each candidate, all at once."""
        totals = np.ones((len(candidates), _NUM_TOTALS), dtype=np.int64)
        if candidates:
            totals[:, 1:] = [candidate.totals for candidate in candidates]
        _, matrix = self._of("")
        best: NDArray[np.int64] = _largest(totals, matrix[:, :_NUM_TOTALS])
        calls = [call for candidate in candidates for call in candidate.calls]
        owners = np.repeat(np.arange(len(candidates)), [len(candidate.calls) for candidate in candidates])
        sizes = call_sizes(calls)
        # Numbered in the order they are met; a kind that was never traced raises when its pieces are asked for.
        codes: dict[str, int] = {}
        kind = np.fromiter((codes.setdefault(call.kind, len(codes)) for call in calls), np.int64, len(calls))
        for name, code in codes.items():
            _, matrix = self._of(name)
            chosen = kind == code
            owner = owners[chosen]
            np.maximum.at(best, owner, _largest(np.hstack([totals[owner], sizes[chosen]]), matrix))
        return best

    def at_least(self, features: PassFeatures) -> LowerBound:
        """Return what every pass needs that falls below ``features`` in no count and makes at least these calls."""
        return LowerBound(self.price(features).required_bytes)

    def at_most(self, features: PassFeatures) -> UpperBound:
        """Return what no pass exceeds that exceeds ``features`` in no count and makes no call beyond these."""
        return UpperBound(self.price(features).required_bytes)

    def with_caller(self, bytes_per_token: int) -> Envelope:
        """Return the envelope with ``bytes_per_token`` per logical token for the caller from the loss on."""
        column, category = COLUMNS.index("logical_tokens"), len(self.categories) - 1
        pieces = []
        for piece in self.pieces:
            if piece.phase in CALLER_PHASES:
                terms = piece.terms.copy()
                terms[category, column] += bytes_per_token
                piece = replace(piece, terms=terms)
            pieces.append(piece)
        return replace(self, pieces=tuple(pieces))

    def _rows(self, features: PassFeatures) -> list[tuple[str, tuple[int, ...]]]:
        return [("", (0,) * len(CALL_SIZES)), *((call.kind, call.sizes) for call in features.calls)]

    def _of(self, kind: str) -> tuple[list[int], NDArray[np.int64]]:
        try:
            return self._by_call[kind]
        except KeyError:
            raise EnvelopeError(f"the pass makes a call of the kind {kind!r}, which was never traced") from None

    @cached_property
    def _by_call(self) -> dict[str, tuple[list[int], NDArray[np.int64]]]:
        """Return the numbers and totals of the pieces by kind of call."""
        numbers: dict[str, list[int]] = {"": []}
        for number, piece in enumerate(self.pieces):
            numbers.setdefault(piece.call, []).append(number)
        return {
            kind: (found, np.array([self.pieces[number].total for number in found]).reshape(-1, len(COLUMNS)))
            for kind, found in numbers.items()
        }


def _largest(rows: NDArray[np.int64], matrix: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return (N,) the largest product of each row (N, D) with any row of ``matrix`` (M, D)."""
    # In float64, whose products are blocked and whose whole numbers are exact up to 8 PiB.
    products = rows.astype(np.float64) @ matrix.T.astype(np.float64)
    largest: NDArray[np.int64] = products.max(1).astype(np.int64)
    return largest


def prune(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Return the pieces that some pass may peak at: those that no other of the same kind of call reaches everywhere.

    Of equal ones the first stays. A piece inside calls also goes when one outside calls reaches it at any size.
    """
    totals = np.array([piece.total for piece in pieces])
    kept: list[int] = []
    # In descending order of their sums, a piece that another reaches everywhere comes after it.
    for number in np.argsort(-totals.sum(1), kind="stable").tolist():
        same = [other for other in kept if pieces[other].call in (pieces[number].call, "")]
        if not same or not np.any(np.all(totals[same] >= totals[number], axis=1)):
            kept.append(number)
    return tuple(pieces[number] for number in sorted(kept))
