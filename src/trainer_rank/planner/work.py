"""One pass as records: the packed rows and what is wanted from them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer_rank.prefix import Layout, PackedBatch, build_tree, choose_layout, pack, shape_fingerprint
from trainer_rank.requests import IGNORED, Request

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadRows:
    """The rows that meet the vocabulary projection, and the labels scored on them.

    A row shared by several requests is projected once, however many labels are scored on it: at a branch point each
    request scores its own next token from its parent's last row.

    Attributes:
        rows: (R,) packed rows, ascending.
        label_row: (M,) position in ``rows`` of each label's row, ascending: a chunk of rows owns a run of labels.
        label: (M,) token ids.
        slot: (M,) where each label's log-prob goes in the concatenated outputs.
        shapes: Output shape of each request, ``labels.shape``.
    """

    rows: Rows
    label_row: Rows
    label: Rows
    slot: Rows
    shapes: tuple[tuple[int, ...], ...]

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassWork:
    """Everything one pass computes.

    Attributes:
        batch: Packed rows of those requests that score something; the others need no row.
        head: What is wanted, of all requests.
        indices: Flat indices of all requests, in the order of the outputs.
        no_grad: Whether the pass builds no graph.
        adapter: Adapter it runs with; None is the runtime's own.
    """

    batch: PackedBatch
    head: HeadRows
    indices: tuple[int, ...]
    no_grad: bool
    adapter: str | None

    @property
    def shape_key(self) -> str:
        """Digest of everything about the pass that its memory depends on, tokens excluded."""
        digest = hashlib.blake2b(shape_fingerprint(self.batch).encode(), digest_size=16)
        counts = (self.head.num_rows, self.head.num_labels, *self.head.sizes)
        digest.update(repr((counts, self.no_grad, self.adapter)).encode())
        digest.update(self.head.label_row.tobytes())
        return digest.hexdigest()


def head_rows(batch: PackedBatch, requests: Sequence[Request], places: Sequence[int | None]) -> HeadRows:
    """Return the head rows of a packed batch.

    Args:
        batch: The packed rows.
        requests: The requests of the pass, all of them active.
        places: Position of each request in the packed batch, None for one that scores nothing and has no rows.
    """
    rows, labels, slots, shapes = [], [], [], []
    offset = 0
    for request, place in zip(requests, places, strict=True):
        wanted = request.labels
        assert wanted is not None, "an inactive request is in no pass"
        if place is not None:
            scored = np.nonzero(wanted != IGNORED)
            rows.append(batch.request_rows(place)[scored[0]])
            labels.append(wanted[scored])
            slots.append(np.ravel_multi_index(scored, wanted.shape) + offset)
        shapes.append(tuple(int(size) for size in wanted.shape))
        offset += wanted.size
    if not rows:
        empty = np.empty(0, dtype=np.int64)
        return HeadRows(rows=empty, label_row=empty, label=empty, slot=empty, shapes=tuple(shapes))
    row, label, slot = (np.concatenate(parts).astype(np.int64) for parts in (rows, labels, slots))
    unique, inverse = np.unique(row, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    return HeadRows(rows=unique, label_row=inverse[order], label=label[order], slot=slot[order], shapes=tuple(shapes))


def pass_work(
    requests: Sequence[Request],
    indices: Sequence[int],
    layout: Layout | None = None,
) -> PassWork:
    """Return the work of one pass over requests that agree in grad mode and adapter.

    Args:
        requests: Active requests, at least one.
        indices: Their flat indices.
        layout: What is shared; None chooses by rows and segments.
    """
    scored = [position for position, request in enumerate(requests) if request.num_trained]
    tree = build_tree([requests[position].tokens for position in scored])
    batch = pack(tree, choose_layout(tree) if layout is None else layout)
    place = {position: number for number, position in enumerate(scored)}
    return PassWork(
        batch=batch,
        head=head_rows(batch, requests, [place.get(position) for position in range(len(requests))]),
        indices=tuple(indices),
        no_grad=requests[0].no_grad,
        adapter=requests[0].adapter,
    )
