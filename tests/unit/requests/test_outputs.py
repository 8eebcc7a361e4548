"""What a request may ask for beside labels, and what it may not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.builders import tiny_runtime
from trainer_rank import BASE, Request, TrainerRank
from trainer_rank.errors import RequestError

TOKENS = [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 0}, "top_k must be a whole number of at least 1, got 0"),
        ({"top_k": 1.5}, "top_k must be a whole number of at least 1, got 1.5"),
        ({"top_k": True}, "top_k must be a whole number of at least 1, got True"),
        ({"logits": [1, 2]}, r"logits must be True or False, got \[1, 2\]; say where with at"),
        ({"hidden_states": 1}, "hidden_states must be True or False, got 1"),
        ({"at": [1]}, "at says where top_k, logits or hidden_states are wanted, and none of them is"),
        ({"logits": True, "at": []}, r"at must have shape \(M,\) with at least one position, got \(0,\)"),
        ({"logits": True, "at": [[1]]}, r"at must have shape \(M,\) with at least one position, got \(1, 1\)"),
        ({"logits": True, "at": [0, 4]}, r"at must hold positions in \[0, 4\), got 4"),
        ({"logits": True, "at": [-1]}, r"at must hold positions in \[0, 4\), got -1"),
        ({"logits": True, "at": [0.5]}, "at must be integers, got dtype float64"),
        (
            {"labels": [1, 2, 3]},
            r"labels must have shape \(N,\) or \(N, K\) for the request's N = 4 tokens, got \(3,\)",
        ),
        ({"labels": [[1, 2, 3, 4], [1, 2, 3, 4]]}, r"labels must have shape .* got \(2, 4\)"),
        ({"labels": np.zeros((4, 2, 2), dtype=int)}, r"labels must have shape .* got \(4, 2, 2\)"),
        ({"labels": np.zeros((4, 0), dtype=int)}, r"labels must be|labels must have shape"),
        ({"labels": 3}, r"labels must have shape .* got \(\)"),
    ],
)
def test_what_cannot_be_meant_is_refused(fields: dict[str, Any], message: str) -> None:
    """Field, rule and value; and the field by name for a program."""
    with pytest.raises(RequestError, match=message) as caught:
        Request(tokens=TOKENS, **fields)
    assert caught.value.field in fields


def test_positions_are_all_unless_said_and_kept_as_given() -> None:
    """In any order, twice if need be; a request without such outputs has none."""
    assert Request(tokens=TOKENS, logits=True).positions.tolist() == [0, 1, 2, 3]
    assert Request(tokens=TOKENS, top_k=2, at=[3, 0, 3]).positions.tolist() == [3, 0, 3]
    assert Request.next_token(TOKENS).positions.size == 0


def test_what_counts_as_active_and_as_computing() -> None:
    """Labels that are all ignored are zeros without the model; an output needs it."""
    ignored = Request(tokens=TOKENS, labels=[-100] * 4)
    assert (ignored.active, ignored.computes, ignored.num_trained) == (True, False, 0)
    dense = Request(tokens=TOKENS, labels=[-100] * 4, hidden_states=True)
    assert (dense.active, dense.computes, dense.num_trained) == (True, True, 0)
    alone = Request(tokens=TOKENS, logits=True, at=[1, 2])
    assert (alone.active, alone.computes, alone.num_trained) == (True, True, 2)
    nothing = Request(tokens=TOKENS)
    assert (nothing.active, nothing.computes) == (False, False)


def test_a_request_says_what_it_wants() -> None:
    """For a log line."""
    request = Request.next_token(TOKENS, top_k=3, logits=True, at=[1, 2], adapter=BASE, no_grad=True)
    assert repr(request) == "Request(4 tokens, 3 scored, top-3, logits at 2, no_grad, adapter='<base>')"


@pytest.mark.parametrize(
    ("lora", "fields", "message"),
    [
        (True, {"adapter": "policy"}, r"adapter must be one the runtime has \(default, <base>\), got 'policy'"),
        (False, {"adapter": "policy"}, r"runtime has \(none, the model itself is trained\), got 'policy'"),
        (False, {"adapter": BASE, "no_grad": True}, "none, the model itself is trained"),
        (True, {"adapter": BASE}, "through which nothing is trained; set no_grad=True"),
        (True, {"top_k": 65}, "top_k must not exceed the vocabulary size 64, got 65"),
    ],
)
def test_what_this_model_cannot_do_is_refused_before_anything_runs(
    lora: bool, fields: dict[str, Any], message: str
) -> None:
    """With the request's number."""
    rank = TrainerRank(tiny_runtime(lora=lora), memory_budget="8GiB", verify_backend=False)
    with pytest.raises(RequestError, match=message) as caught:
        rank.forward_micro_batches([Request.next_token(TOKENS), Request.next_token(TOKENS, **fields)])
    assert caught.value.index == 1
