"""From the stretches of a few traced passes to an envelope.

After the i-th allocation of a stretch the live bytes are an affine function of the pass's features. Traces of as many
passes as there are features give its coefficients by a linear solve; they are whole numbers (bytes per row), and what
is left over after rounding must be nothing. Inside a call the live bytes at its begin depend on the pass, and what is
added until the i-th allocation depends on the sizes of that call alone, so the two are solved for apart.

A model of many layers is composed from two shallow twins: at the first and the last layer of each phase, and outside
layers, live bytes are affine in the depth (``memory.extrapolate``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer_rank.errors import EnvelopeError
from trainer_rank.memory.envelope import CALLER_PHASES, COLUMNS, Envelope, Piece, prune
from trainer_rank.memory.features import CALL_SIZES, TOTALS, Call, PassFeatures
from trainer_rank.memory.stretches import (
    NUM_CATEGORIES,
    TEMPORARY,
    Stretch,
    StretchKey,
    stretches,
    stretches_at_depth,
    stretches_of_two_kinds,
)
from trainer_rank.memory.trace import Trace

# Logical tokens cost nothing by themselves; only a caller's declaration gives them a price.
_SOLVED: Final = tuple(name for name in TOTALS if name != "logical_tokens")
_PLAIN_SIZES: Final = tuple(name for name in CALL_SIZES if not name.endswith("_scratch"))

# The calls that find no buffers of their own to write into.
_OPENING: Final = frozenset({"single", "root", "buffers"})

_EXACT: Final = 1e-6
"""Relative residual up to which a solution counts as exact."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TracedPass:
    """One traced pass.

    Attributes:
        features: Its features, with **all** its calls: those of attention in order, then the chunks of the head.
        shallow: Its trace at the smaller depth; one layer is enough for a pass that only shows kinds of calls.
        deeper: Its trace at the larger depth; None for a pass that only shows kinds of calls.
        wider: Where some layers are recomputed and some are not, ``deeper`` has one more that is, and this trace one
            more that is not; None where all are treated alike, or the other two are one and whole.
    """

    features: PassFeatures
    shallow: Trace
    deeper: Trace | None
    wider: Trace | None = None

    def at(self, num_layers: int, recomputed: int | None) -> list[Stretch]:
        """Return its stretches through a model of ``num_layers`` layers, of which the first ``recomputed`` run again.

        Raises:
            EnvelopeError: It makes other allocations there.
        """
        assert self.deeper is not None, "a pass that is solved for"
        if self.wider is None:
            return stretches_at_depth(self.shallow, self.deeper, num_layers)
        assert recomputed is not None, "three traces are of two kinds of layers"
        return stretches_of_two_kinds(self.shallow, self.deeper, self.wider, num_layers, recomputed)


def solve(
    passes: Sequence[TracedPass], *, num_layers: int, categories: tuple[str, ...], recomputed: int | None = None
) -> Envelope:
    """Return the envelope of a model of ``num_layers`` layers.

    Args:
        passes: Traced passes, of one signature. Those with two depths must be one more than the features solved for.
        num_layers: Depth of the model, at least that of the deeper traces.
        categories: Names of the terms, ``NUM_CATEGORIES`` of them.
        recomputed: Layers that run again in backward, where the others do not; None where all are treated alike.

    Raises:
        EnvelopeError: The traces are too few, or their live bytes are not affine in the features.
    """
    assert len(categories) == NUM_CATEGORIES, "one name per category"
    by_depth = [(traced.features, traced.at(num_layers, recomputed)) for traced in passes if traced.deeper is not None]
    shallow = [(traced.features, list(stretches(traced.shallow))) for traced in passes]
    depth = _Depth(num_layers, recomputed)
    pieces = [*_between_calls(by_depth, depth), *_inside_calls(by_depth, shallow, depth)]
    with_caller = [piece for piece in pieces if piece.phase in CALLER_PHASES]
    others = [piece for piece in pieces if piece.phase not in CALLER_PHASES]
    return Envelope(
        categories=categories,
        pieces=(*prune(others), *(prune(with_caller) if with_caller else ())),
        retained=_retained(by_depth),
    )


class _Depth(NamedTuple):
    num_layers: int
    recomputed: int | None


_Sampled = Sequence[tuple[PassFeatures, Sequence[Stretch]]]


def _between_calls(samples: _Sampled, depth: _Depth) -> Iterable[Piece]:
    found: dict[StretchKey, list[tuple[PassFeatures, Stretch]]] = {}
    for features, made in samples:
        for stretch in made:
            if not stretch.key.call:
                found.setdefault(stretch.key, []).append((features, stretch))
    for key, pairs in found.items():
        design = _design([features for features, _ in pairs])
        curves = [stretch.live for _, stretch in pairs]
        if len({len(curve) for curve in curves}) > 1:
            # So many allocations per request or per bucket: only the peak of the stretch is affine.
            curves = [curve[[int(curve.sum(1).argmax())]] for curve in curves]
        for terms in _coefficients(design, curves, key):
            yield _piece(key, depth, {"one": terms[0], **dict(zip(_SOLVED, terms[1:], strict=True))})


def _inside_calls(by_depth: _Sampled, shallow: _Sampled, depth: _Depth) -> Iterable[Piece]:
    found: dict[StretchKey, list[tuple[Call, Stretch]]] = {}
    for features, made in shallow:
        for stretch in made:
            if stretch.key.call:
                call = _call_of(features, stretch)
                found.setdefault(_code(replace(stretch.key, call=call.kind)), []).append((call, stretch))
    begins = _begins(by_depth)
    for code, pairs in found.items():
        added = _added(code, pairs)
        for group, base in begins.items():
            if _code(group) == replace(code, call=_group(code).call):
                key = replace(group, call=code.call)
                yield from (_piece(key, depth, {**base, **sizes}, constant=constant) for constant, sizes in added)


def _added(
    code: StretchKey, pairs: Sequence[tuple[Call, Stretch]]
) -> list[tuple[NDArray[np.int64], dict[str, NDArray[np.int64]]]]:
    """Return what a call adds to what it finds, after each of its allocations: a constant, and bytes per size.

    What the kernel allocates inside is live after one of them, whole, and not after the others.
    """
    scratch_name = "backward_scratch" if code.phase == "backward" else "forward_scratch"
    design = np.array([[1, *(getattr(call, name) for name in _PLAIN_SIZES)] for call, _ in pairs], dtype=np.float64)
    scratch = np.array([getattr(call, scratch_name) for call, _ in pairs], dtype=np.int64)
    curves = [stretch.live - stretch.live[0] for _, stretch in pairs]
    if len({len(curve) for curve in curves}) > 1:
        raise EnvelopeError(f"{_name(code)} makes other allocations in other passes")
    found = []
    for number in range(len(curves[0])):
        point = np.array([curve[number] for curve in curves])[:, None]
        with_scratch = point.copy()
        with_scratch[:, 0, TEMPORARY] -= scratch
        try:
            terms, holds = _coefficients(design, point, code)[0], 0
        except EnvelopeError:
            terms, holds = _coefficients(design, with_scratch, code)[0], 1
        if not scratch.any():
            # A kernel that needed nothing inside in any trace may need something in a larger call. When in the call
            # is not known then, so it is charged all along.
            holds = 1
        inside = np.zeros(NUM_CATEGORIES, dtype=np.int64)
        inside[TEMPORARY] = holds
        found.append((terms[0], {**dict(zip(_PLAIN_SIZES, terms[1:], strict=True)), scratch_name: inside}))
    return found


def _code(key: StretchKey) -> StretchKey:
    """Return the key of the code that runs: a call is the same in every layer of a phase."""
    return replace(key, end="layer" if key.end else "", visit=0, part=0)


def _begins(by_depth: _Sampled) -> dict[StretchKey, dict[str, NDArray[np.int64]]]:
    """Return what is live as the calls of each group begin, by column; it is the same for all calls of a group."""
    found: dict[StretchKey, list[tuple[PassFeatures, NDArray[np.int64]]]] = {}
    for features, made in by_depth:
        for stretch in made:
            if stretch.key.call:
                found.setdefault(_group(stretch.key), []).append((features, stretch.live[:1]))
    solved = {}
    for key, pairs in found.items():
        (terms,) = _coefficients(_design([features for features, _ in pairs]), [live for _, live in pairs], key)
        solved[key] = {"one": terms[0], **dict(zip(_SOLVED, terms[1:], strict=True))}
    return solved


def _group(key: StretchKey) -> StretchKey:
    """Return the key of the calls that find the same live bytes."""
    call = "opening" if key.call in _OPENING else "chunk" if key.call == "chunk" else "inside"
    return replace(key, call=call)


def _call_of(features: PassFeatures, stretch: Stretch) -> Call:
    chunk = stretch.key.call == "chunk"
    calls = [call for call in features.calls if (call.kind == "chunk") == chunk]
    call = calls[stretch.number]
    if not call.kind.startswith(stretch.key.call):
        raise EnvelopeError(f"call {stretch.number} was announced as {call.kind!r} and ran as {stretch.key.call!r}")
    return call


def _retained(samples: _Sampled) -> NDArray[np.int64]:
    """Return the coefficients of what is live when the forward has ended."""
    left = []
    for _, made in samples:
        ends = [stretch.left for stretch in made if stretch.key.phase == "outputs"]
        left.append(ends[-1][None])
    key = StretchKey("outputs", "", 0, 0)
    (terms,) = _coefficients(_design([features for features, _ in samples]), left, key)
    retained = np.zeros(len(COLUMNS), dtype=np.int64)
    retained[0] = terms[0].sum()
    for name, term in zip(_SOLVED, terms[1:], strict=True):
        retained[COLUMNS.index(name)] = term.sum()
    return retained


def _design(features: Sequence[PassFeatures]) -> NDArray[np.float64]:
    return np.array([[1, *(getattr(one, name) for name in _SOLVED)] for one in features], dtype=np.float64)


def _coefficients(
    design: NDArray[np.float64], curves: Sequence[NDArray[np.int64]] | NDArray[np.int64], key: StretchKey
) -> NDArray[np.int64]:
    """Return (allocations, 1 + features, categories) whole numbers that give every sample's curve.

    Args:
        design: (samples, 1 + features), the first column 1.
        curves: Per sample (allocations, categories).
        key: For the words of an error.
    """
    if len({len(curve) for curve in curves}) > 1:
        raise EnvelopeError(f"{_name(key)} makes other allocations in other passes")
    # A column that is zero, or the same as an earlier one, for every call of a kind is not told apart from it.
    used = [
        column
        for column in range(design.shape[1])
        if design[:, column].any()
        and not any(np.array_equal(design[:, column], design[:, other]) for other in range(column))
    ]
    scale = design[:, used].max(0)
    matrix = design[:, used] / scale
    if np.linalg.matrix_rank(matrix, tol=1e-7) < len(used):
        raise EnvelopeError(f"{_name(key)} was traced in too few passes: {len(design)} for {len(used)} coefficients")
    wanted = np.array(curves, dtype=np.float64)
    flat = wanted.reshape(len(curves), -1)
    exact, *_ = np.linalg.lstsq(matrix, flat, rcond=None)
    whole = np.rint(exact / scale[:, None])
    off = np.abs(design[:, used] @ whole - flat).max()
    if off > _EXACT * max(1.0, np.abs(flat).max()):
        raise EnvelopeError(f"{_name(key)} is not affine in the features: {off:.0f} bytes are left over")
    if whole.min() < 0:
        raise EnvelopeError(f"{_name(key)} has a negative coefficient")
    full = np.zeros((design.shape[1], flat.shape[1]), dtype=np.int64)
    full[used] = whole
    return np.moveaxis(full.reshape(design.shape[1], *wanted.shape[1:]), 0, 1)


def _piece(
    key: StretchKey,
    depth: _Depth,
    columns: dict[str, NDArray[np.int64]],
    constant: NDArray[np.int64] | None = None,
) -> Piece:
    terms = np.zeros((NUM_CATEGORIES, len(COLUMNS)), dtype=np.int64)
    for name, by_category in columns.items():
        terms[:, COLUMNS.index(name)] = by_category
    if constant is not None:
        terms[:, 0] += constant
    return Piece(phase=key.phase, layer=key.layer(*depth), call=key.call, terms=terms)


def _name(key: StretchKey) -> str:
    where = f"{key.phase}, {key.end} layer" if key.end else key.phase
    return f"{where}, call {key.call!r}" if key.call else where
