"""A pass as records: which rows it computes and which labels are scored on them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.property.strategies import Rows
from trainer_rank.planner import PassWork, pass_work
from trainer_rank.prefix import Layout
from trainer_rank.requests import IGNORED, Request

LAYOUTS = [Layout.no_sharing(), Layout.full_sharing(), None]


def path_of(work: PassWork, row: int) -> list[int]:
    """Return the token ids from the root to a packed row, by walking the segments' ancestors."""
    batch = work.batch
    found: list[int] = []
    segments = [
        number
        for number in range(batch.num_segments)
        if batch.segment_start[number] <= row < batch.subtree_stop[number]
    ]
    for segment in segments:
        start, stop = int(batch.segment_start[segment]), int(batch.segment_stop[segment])
        found += batch.token_ids[start : min(stop, row + 1)].tolist()
    return found


@st.composite
def labelled(draw: st.DrawFn) -> list[Request]:
    """Requests over three tokens with arbitrary labels, some with several per position, some with none scored."""
    rows: Rows = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=5))
    found = []
    for row in rows:
        wide = draw(st.sampled_from([None, 1, 3]))
        shape = (len(row),) if wide is None else (len(row), wide)
        values = draw(
            st.lists(st.sampled_from([IGNORED, 0, 1, 5]), min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))
        )
        found.append(Request(tokens=np.array(row), labels=np.array(values).reshape(shape)))
    return found


@given(labelled(), st.sampled_from(LAYOUTS))
def test_every_scored_label_is_scored_once_on_a_row_with_its_own_history(
    requests: list[Request], layout: Layout | None
) -> None:
    """The row a label is scored on ends exactly the tokens up to its position, whatever is shared."""
    work = pass_work(requests, range(len(requests)), layout)
    head, offsets = work.head, np.cumsum([0, *work.head.sizes])
    by_slot = dict(zip(head.slot.tolist(), range(head.num_labels), strict=True))
    assert len(by_slot) == head.num_labels == sum(request.num_trained for request in requests)
    for number, request in enumerate(requests):
        assert request.labels is not None
        width = request.labels.size // request.num_tokens
        for place, label in enumerate(request.labels.reshape(-1).tolist()):
            slot = int(offsets[number]) + place
            if label == IGNORED:
                assert slot not in by_slot
                continue
            found = by_slot[slot]
            assert head.label[found] == label
            row = int(head.rows[head.label_row[found]])
            assert path_of(work, row) == request.tokens[: place // width + 1].tolist()


@given(labelled(), st.sampled_from(LAYOUTS))
def test_no_row_is_projected_twice_and_chunks_own_runs_of_labels(
    requests: list[Request], layout: Layout | None
) -> None:
    """Head rows ascend without repetition, each carries a label, and labels come in the order of their rows."""
    head = pass_work(requests, range(len(requests)), layout).head
    assert (np.diff(head.rows) > 0).all()
    assert (np.diff(head.label_row) >= 0).all()
    assert np.unique(head.label_row).tolist() == list(range(head.num_rows))


def test_siblings_score_their_first_token_on_one_shared_row() -> None:
    """At a branch point one projection serves all."""
    requests = [
        Request.next_token([5, 6, 7], trained=[False, False, True]),
        Request.next_token([5, 6, 8], trained=[False, False, True]),
    ]
    head = pass_work(requests, [0, 1], Layout.full_sharing()).head
    assert (head.num_rows, head.num_labels) == (1, 2)
    assert head.label.tolist() == [7, 8]


def test_a_request_that_scores_nothing_takes_no_row() -> None:
    """It keeps its output slots and nothing else."""
    silent = Request(tokens=[1, 2, 3], labels=[IGNORED] * 3)
    work = pass_work([silent, Request.next_token([4, 5])], [0, 1])
    assert (work.batch.packed_rows, work.head.sizes) == (2, (3, 2))


def test_a_pass_that_scores_nothing_has_no_rows_at_all() -> None:
    """An all-masked pass is empty but for its outputs."""
    work = pass_work([Request(tokens=[1, 2], labels=[IGNORED] * 2)], [0])
    assert (work.batch.packed_rows, work.head.num_rows, work.head.num_labels) == (0, 0, 0)


def shape_key(rows: list[list[int]], **fields: object) -> str:
    """Return the shape key of a fully shared pass over next-token requests."""
    requests = [Request.next_token(row, **fields) for row in rows]  # type: ignore[arg-type]
    return pass_work(requests, range(len(rows)), Layout.full_sharing()).shape_key


def test_the_shape_does_not_depend_on_the_tokens() -> None:
    """Other words in a tree of the same form cost the same and are priced once."""
    assert shape_key([[1, 2, 3], [1, 2, 4]]) == shape_key([[7, 8, 9], [7, 8, 5]])


@pytest.mark.parametrize(
    ("rows", "fields"),
    [
        ([[1, 2, 3], [1, 2, 4, 5]], {}),
        ([[1, 2, 3], [1, 5, 4]], {}),
        ([[1, 2, 3]], {}),
        ([[1, 2, 3], [1, 2, 4]], {"no_grad": True}),
        ([[1, 2, 3], [1, 2, 4]], {"top_k": 2}),
        ([[1, 2, 3], [1, 2, 4]], {"logits": True, "at": [1]}),
        ([[1, 2, 3], [1, 2, 4]], {"hidden_states": True}),
        ([[1, 2, 3], [1, 2, 4]], {"trained": [False, False, True]}),
    ],
)
def test_whatever_changes_the_memory_changes_the_shape(rows: list[list[int]], fields: dict[str, object]) -> None:
    """Lengths, branching, grad mode, adapter and scored labels are all in the key."""
    assert shape_key(rows, **fields) != shape_key([[1, 2, 3], [1, 2, 4]])


def test_another_adapter_is_another_shape() -> None:
    """Its matrices may have another rank, and other targets."""
    requests = [Request.next_token([1, 2, 3])]
    assert pass_work(requests, [0], adapter="other").shape_key != pass_work(requests, [0]).shape_key


def test_rows_of_every_output_are_found_through_the_layout() -> None:
    """Ranked rows are ranked once for the largest k; hidden states and logits come request by request."""
    requests = [
        Request(tokens=[1, 2, 3], top_k=2, at=[1, 0]),
        Request(tokens=[1, 2, 4], top_k=3, hidden_states=True, at=[2, 1]),
        Request(tokens=[1, 2], logits=True),
        Request(tokens=[7], labels=[-100]),
    ]
    work = pass_work(requests, range(4), Layout.full_sharing())
    # Packed: 1 2 shared, then 3 and 4; the last request computes nothing.
    assert work.batch.packed_rows == 4
    place = {(request, position): int(work.batch.request_rows(request)[position]) for request in (0, 1) for position in
             range(3)}  # fmt: skip
    top = work.head.top
    assert top.k == 3
    assert work.head.rows[top.rows].tolist() == sorted({place[0, 0], place[0, 1], place[1, 2]})
    ranked = work.head.rows[top.rows].tolist()
    wanted = [(place[0, 1], 2), (place[0, 0], 2), (place[1, 2], 3), (place[1, 1], 3)]
    assert top.take.tolist() == [ranked.index(row) * 3 + rank for row, k in wanted for rank in range(k)]
    assert top.shapes == ((2, 2), (2, 3), (0, 0), (0, 0))
    assert work.hidden.rows.tolist() == [place[1, 2], place[1, 1]]
    assert work.hidden.sizes == (0, 2, 0, 0)
    assert work.logits.rows.tolist() == [place[0, 0], place[0, 1]]
    assert work.logits.sizes == (0, 0, 2, 0)
    assert work.head.shapes == ((0,), (0,), (0,), (1,))
    assert not work.scores_only
