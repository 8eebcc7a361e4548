"""One pass as records: the packed rows and what is wanted from them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trainer_rank.prefix import (
    DEFAULT_SEGMENT_COST_ROWS,
    Layout,
    PackedBatch,
    build_tree,
    choose_layout,
    pack,
    shape_fingerprint,
)
from trainer_rank.requests import IGNORED, Request

Rows = NDArray[np.int64]


def _none() -> Rows:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopRows:
    """Head rows whose likeliest tokens are wanted; a row that several requests want is ranked once, for the largest k.

    Attributes:
        rows: (T,) positions in the head rows, ascending.
        k: Largest k of the pass; 0 when no request wants any.
        take: (E,) which entries of the flattened (T, k) ranking each output entry is.
        shapes: Output shape (M, k) of each request of the pass, (0, 0) for one that wants none.
    """

    rows: Rows = field(default_factory=_none)
    k: int = 0
    take: Rows = field(default_factory=_none)
    shapes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DenseRows:
    """Packed rows whose hidden state, or whose logits, are an output, request by request.

    Attributes:
        rows: (S,) packed rows, those of one request after those of another.
        sizes: Rows of each request of the pass, 0 for one that wants none.
    """

    rows: Rows = field(default_factory=_none)
    sizes: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """S."""
        return int(self.rows.size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadRows:
    """The rows that meet the vocabulary projection in chunks, and the labels scored on them.

    A row shared by several requests is projected once, however many labels are scored on it: at a branch point each
    request scores its own next token from its parent's last row.

    Attributes:
        rows: (R,) packed rows, ascending.
        label_row: (M,) position in ``rows`` of each label's row, ascending: a chunk of rows owns a run of labels.
        label: (M,) token ids.
        slot: (M,) where each label's log-prob goes in the concatenated outputs.
        shapes: Output shape of each request, ``labels.shape``; (0,) for one without labels.
        top: Rows that are ranked.
    """

    rows: Rows
    label_row: Rows
    label: Rows
    slot: Rows
    shapes: tuple[tuple[int, ...], ...]
    top: TopRows = field(default_factory=TopRows)

    @property
    def num_rows(self) -> int:
        """R."""
        return int(self.rows.size)

    @property
    def num_labels(self) -> int:
        """M."""
        return int(self.label.size)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Output elements of each request."""
        return tuple(int(np.prod(shape)) for shape in self.shapes)

    def scored(self, owners: Sequence[int]) -> list[bool]:
        """Return whether each of these requests has a label that is scored."""
        edges = np.cumsum([0, *self.sizes])
        found = np.searchsorted(np.sort(self.slot), edges)
        return [bool(found[owner + 1] > found[owner]) for owner in owners]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassWork:
    """Everything one pass computes.

    Attributes:
        batch: Packed rows of those requests that compute something; the others need no row.
        head: What is scored and ranked, of all requests.
        hidden: Rows whose hidden states are outputs.
        logits: Rows whose logits are outputs; they are projected for each request that wants them.
        indices: Flat indices of all requests, in the order of the outputs.
        no_grad: Whether the pass builds no graph.
        adapter: Adapter it runs with; None is the runtime's own.
        recomputed: First layers that run again in backward, where the runtime leaves it to the pass; None: as it does.
    """

    batch: PackedBatch
    head: HeadRows
    hidden: DenseRows = field(default_factory=DenseRows)
    logits: DenseRows = field(default_factory=DenseRows)
    indices: tuple[int, ...]
    no_grad: bool
    adapter: str | None
    recomputed: int | None = None

    @property
    def scores_only(self) -> bool:
        """Whether log-probs of labels are all it is asked for."""
        return not (self.head.top.k or self.hidden.num_rows or self.logits.num_rows)

    @property
    def shape_key(self) -> str:
        """Digest of everything about the pass that its memory depends on, tokens excluded."""
        digest = hashlib.blake2b(shape_fingerprint(self.batch).encode(), digest_size=16)
        counts = (self.head.num_rows, self.head.num_labels, *self.head.sizes)
        digest.update(repr((counts, self.no_grad, self.adapter, self.recomputed)).encode())
        digest.update(self.head.label_row.tobytes())
        if not self.scores_only:
            top = self.head.top
            digest.update(repr((top.k, top.shapes, self.hidden.sizes, self.logits.sizes)).encode())
            digest.update(top.rows.tobytes())
        return digest.hexdigest()


def head_rows(batch: PackedBatch, requests: Sequence[Request], places: Sequence[int | None]) -> HeadRows:
    """Return the head rows of a packed batch.

    Args:
        batch: The packed rows.
        requests: The requests of the pass, all of them active.
        places: Position of each request in the packed batch, None for one that computes nothing and has no rows.
    """
    rows, labels, slots = [], [], []
    shapes: list[tuple[int, ...]] = []
    offset = 0
    for request, place in zip(requests, places, strict=True):
        wanted = request.labels
        if wanted is None:
            shapes.append((0,))
            continue
        if place is not None:
            scored = np.nonzero(wanted != IGNORED)
            rows.append(batch.request_rows(place)[scored[0]])
            labels.append(wanted[scored])
            slots.append(np.ravel_multi_index(scored, wanted.shape) + offset)
        shapes.append(tuple(int(size) for size in wanted.shape))
        offset += wanted.size
    row, label, slot = (np.concatenate([_none(), *parts]) for parts in (rows, labels, slots))
    ranked = [
        batch.request_rows(place)[request.positions] if request.top_k is not None and place is not None else _none()
        for request, place in zip(requests, places, strict=True)
    ]
    unique, inverse = np.unique(np.concatenate([row, *ranked]), return_inverse=True)
    inverse = inverse[: row.size]
    order = np.argsort(inverse, kind="stable")
    return HeadRows(
        rows=unique,
        label_row=inverse[order],
        label=label[order],
        slot=slot[order],
        shapes=tuple(shapes),
        top=_top_rows(requests, ranked, unique),
    )


def _top_rows(requests: Sequence[Request], ranked: Sequence[Rows], head: Rows) -> TopRows:
    """Return what is ranked: ``ranked`` holds the packed rows of each request, ``head`` all head rows."""
    largest = max((request.top_k or 0 for request in requests), default=0)
    if not largest:
        return TopRows()
    rows = np.unique(np.concatenate(ranked))
    take, shapes = [], []
    for request, own in zip(requests, ranked, strict=True):
        k = request.top_k or 0
        shapes.append((int(own.size), k) if k else (0, 0))
        take.append((np.searchsorted(rows, own)[:, None] * largest + np.arange(k)[None]).reshape(-1))
    return TopRows(
        rows=np.searchsorted(head, rows), k=largest, take=np.concatenate(take).astype(np.int64), shapes=tuple(shapes)
    )


def _dense_rows(batch: PackedBatch, requests: Sequence[Request], places: Sequence[int | None], kind: str) -> DenseRows:
    rows = [
        batch.request_rows(place)[request.positions] if getattr(request, kind) and place is not None else _none()
        for request, place in zip(requests, places, strict=True)
    ]
    return DenseRows(rows=np.concatenate(rows), sizes=tuple(int(own.size) for own in rows))


def pass_work(
    requests: Sequence[Request],
    indices: Sequence[int],
    layout: Layout | None = None,
    *,
    adapter: str | None = None,
    segment_rows: int = DEFAULT_SEGMENT_COST_ROWS,
) -> PassWork:
    """Return the work of one pass over requests that agree in grad mode and adapter.

    Args:
        requests: Active requests, at least one.
        indices: Their flat indices.
        layout: What is shared; None chooses by rows and segments.
        adapter: The adapter, None for the runtime's own.
        segment_rows: Rows that a segment counts for when a layout is chosen.
    """
    computed = [position for position, request in enumerate(requests) if request.computes]
    tree = build_tree([requests[position].tokens for position in computed])
    batch = pack(tree, choose_layout(tree, segment_rows) if layout is None else layout)
    place = {position: number for number, position in enumerate(computed)}
    places = [place.get(position) for position in range(len(requests))]
    return PassWork(
        batch=batch,
        head=head_rows(batch, requests, places),
        hidden=_dense_rows(batch, requests, places, "hidden_states"),
        logits=_dense_rows(batch, requests, places, "logits"),
        indices=tuple(indices),
        no_grad=requests[0].no_grad,
        adapter=adapter,
    )
