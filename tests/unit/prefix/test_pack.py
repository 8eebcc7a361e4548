"""Packing on hand-made cases."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from trainer_rank.prefix import Layout, PrefixTree, build_tree, pack


@pytest.fixture
def tree() -> PrefixTree:
    """The tree drawn in the module docstring: abc, abdef, abdg."""
    return build_tree([np.frombuffer(word, dtype=np.uint8).astype(np.int64) for word in (b"abc", b"abdef", b"abdg")])


def test_the_drawing_in_the_module_docstring_holds(tree: PrefixTree) -> None:
    """Rows and segment table are as drawn when d is replayed."""
    batch = pack(tree, Layout.mixed((True, True, False, True, True)))
    batch.check()
    assert bytes(batch.token_ids.tolist()) == b"abcdefdg"
    assert batch.positions.tolist() == [0, 1, 2, 2, 3, 4, 2, 3]
    assert batch.segment_start.tolist() == [0, 2, 3, 6]
    assert batch.segment_stop.tolist() == [2, 3, 6, 8]
    assert batch.segment_parent.tolist() == [-1, 0, 0, 0]
    assert batch.subtree_stop.tolist() == [8, 3, 6, 8]


def test_requests_keep_the_callers_order(tree: PrefixTree) -> None:
    """The i-th request of the batch is the i-th asked for."""
    batch = pack(tree, Layout.full_sharing(), [2, 0])
    assert batch.requests.tolist() == [2, 0]
    assert batch.request_length.tolist() == [4, 3]
    assert [bytes(batch.token_ids[batch.request_rows(i)].tolist()) for i in (0, 1)] == [b"abdg", b"abc"]


def test_request_path_leads_from_root_to_end(tree: PrefixTree) -> None:
    """Segments come in the order of the request's tokens."""
    assert pack(tree, Layout.full_sharing()).request_path(1).tolist() == [0, 2, 3]


def test_sharing_ratio_is_logical_tokens_per_packed_row(tree: PrefixTree) -> None:
    """12 tokens in 7 rows."""
    batch = pack(tree, Layout.full_sharing())
    assert (batch.logical_tokens, batch.packed_rows, batch.num_requests) == (12, 7, 3)
    assert batch.sharing_ratio == pytest.approx(12 / 7)


def test_nothing_packs_to_an_empty_batch(tree: PrefixTree) -> None:
    """No requests give no rows."""
    for batch in (pack(tree, Layout.full_sharing(), []), pack(build_tree([]), Layout.no_sharing())):
        batch.check()
        assert (batch.packed_rows, batch.num_segments, batch.sharing_ratio) == (0, 0, 1.0)


@pytest.mark.parametrize(("requests", "said"), [([0, 3], "got 3"), ([-1], "got -1"), ([1, 1], "got 1 twice")])
def test_a_wrong_request_index_is_an_error(tree: PrefixTree, requests: list[int], said: str) -> None:
    """The error names the index."""
    with pytest.raises(ValueError, match=said):
        pack(tree, Layout.full_sharing(), requests)


@pytest.mark.parametrize("name", ["positions", "segment_stop", "segment_parent", "subtree_stop", "request_length"])
def test_check_notices_any_altered_array(tree: PrefixTree, name: str) -> None:
    """The invariants cover every array but tokens and numbering."""
    batch = pack(tree, Layout.full_sharing())
    altered = getattr(batch, name).copy()
    altered[1] += 1
    with pytest.raises(AssertionError):
        dataclasses.replace(batch, **{name: altered}).check()
