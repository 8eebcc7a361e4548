"""Requests: what they take, what they refuse, how labels are aligned."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer_rank.errors import RequestError, TrainerRankError
from trainer_rank.requests import IGNORED, Request


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3],
        (1, 2, 3),
        np.array([1, 2, 3]),
        np.array([1, 2, 3], dtype=np.int32),
        np.array([1, 2, 3], dtype=np.uint16),
        np.array([[1, 2, 3]]),
        torch.tensor([1, 2, 3]),
        torch.tensor([1, 2, 3], dtype=torch.int32),
        torch.tensor([[1, 2, 3]]),
        torch.tensor([1, 0, 2, 0, 3])[::2],
    ],
    ids=["list", "tuple", "numpy", "int32", "uint16", "one row", "tensor", "int32 tensor", "one-row tensor", "strided"],
)
def test_tokens_come_as_lists_arrays_or_tensors(tokens: Any) -> None:
    """All of them become one int64 array."""
    request = Request(tokens=tokens, labels=tokens)
    assert request.labels is not None
    for array in (request.tokens, request.labels):
        assert array.dtype == np.int64
        assert array.tolist() == [1, 2, 3]


def test_requests_import_no_torch() -> None:
    """Tensors are read through DLPack; the package needs no torch for it."""
    code = "import sys, trainer_rank.requests as r; r.Request.next_token([1, 2]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_later_changes_by_the_caller_have_no_effect() -> None:
    """Tokens and labels are copied and read-only."""
    tokens, labels = np.array([1, 2]), torch.tensor([2, 3])
    request = Request(tokens=tokens, labels=labels)
    tokens[0] = 9
    labels[0] = 9
    assert request.labels is not None
    assert (request.tokens.tolist(), request.labels.tolist()) == ([1, 2], [2, 3])
    with pytest.raises(ValueError, match="read-only"):
        request.tokens[0] = 9
    with pytest.raises(ValueError, match="read-only"):
        request.labels[0] = 9


BAD = {
    "no tokens": ({"tokens": []}, "tokens", "at least one token"),
    "negative token": ({"tokens": [1, -2, 3]}, "tokens", r"not be negative, got -2 at position 1"),
    "float tokens": ({"tokens": [1.0, 2.0]}, "tokens", "must be integers, got dtype float64"),
    "boolean tokens": ({"tokens": [True, False]}, "tokens", "must be integers, got dtype bool"),
    "text": ({"tokens": "hello"}, "tokens", "must be integers"),
    "None": ({"tokens": None}, "tokens", "must be integers"),
    "two rows": ({"tokens": [[1, 2], [3, 4]]}, "tokens", r"shape \(N,\) or \(1, N\), got \(2, 2\)"),
    "ragged rows": ({"tokens": [[1, 2], [3]]}, "tokens", "flat sequence of numbers"),
    "a single number": ({"tokens": 5}, "tokens", r"shape \(N,\)"),
    "short labels": ({"tokens": [1, 2, 3], "labels": [2, 3]}, "labels", r"N = 3 tokens, got \(2,\)"),
    "long labels": ({"tokens": [1, 2], "labels": [2, 3, 4]}, "labels", r"pad positions .* with -100"),
    "no labels": ({"tokens": [1, 2], "labels": []}, "labels", r"got \(0,\)"),
    "labels of rank 3": ({"tokens": [1, 2], "labels": np.zeros((2, 1, 1), int)}, "labels", "shape"),
    "no labels per position": ({"tokens": [1, 2], "labels": np.zeros((2, 0), int)}, "labels", "shape"),
    "other negative label": ({"tokens": [1, 2], "labels": [-1, 3]}, "labels", "got -1 at position 0"),
    "float labels": ({"tokens": [1, 2], "labels": [2.0, 3.0]}, "labels", "must be integers"),
    "weight not a number": ({"tokens": [1], "weight": math.nan}, "weight", "finite and not negative, got nan"),
    "infinite weight": ({"tokens": [1], "weight": math.inf}, "weight", "finite"),
    "negative weight": ({"tokens": [1], "weight": -0.5}, "weight", "got -0.5"),
    "device tensor": ({"tokens": torch.empty(3, dtype=torch.int64, device="meta")}, "tokens", "move it to the CPU"),
}


@pytest.mark.parametrize(("fields", "field", "message"), BAD.values(), ids=BAD.keys())
def test_a_malformed_field_is_refused_by_name(fields: dict[str, Any], field: str, message: str) -> None:
    """The error names the field, the rule and the value, and is a ValueError."""
    with pytest.raises(RequestError, match=message) as caught:
        Request(**fields)
    assert caught.value.field == field
    assert str(caught.value).startswith(field)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, TrainerRankError)


def test_labels_may_be_several_per_position() -> None:
    """(N, K) labels score K tokens from each position; ignored ones count for nothing."""
    request = Request(tokens=[1, 2], labels=[[3, 4, IGNORED], [IGNORED, 5, 6]])
    assert request.labels is not None
    assert request.labels.shape == (2, 3)
    assert request.num_trained == 4


def test_one_token_may_have_several_labels() -> None:
    """(1, K) labels of a one-token request stay (1, K)."""
    request = Request(tokens=[1], labels=[[3, 4]])
    assert request.labels is not None
    assert request.labels.shape == (1, 2)


def test_a_request_without_labels_is_inactive() -> None:
    """It wants nothing; one whose labels are all ignored wants its zeros."""
    assert not Request(tokens=[1, 2]).active
    masked = Request(tokens=[1, 2], labels=[IGNORED, IGNORED])
    assert masked.active
    assert masked.num_trained == 0


@given(tokens=st.lists(st.integers(0, 9), min_size=1, max_size=8), data=st.data())
def test_next_token_scores_each_trained_token_from_the_position_before_it(
    tokens: list[int], data: st.DataObject
) -> None:
    """``trained`` is over tokens; the first is never scored and the last position predicts nothing."""
    mask = data.draw(st.none() | st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    request = Request.next_token(tokens, trained=mask)
    wanted = [
        tokens[i + 1] if i + 1 < len(tokens) and (mask is None or mask[i + 1]) else IGNORED for i in range(len(tokens))
    ]
    assert request.labels is not None
    assert request.labels.tolist() == wanted
    assert request.num_trained == sum(label != IGNORED for label in wanted)


def test_next_token_takes_a_tensor_mask_and_passes_the_rest_on() -> None:
    """Weight, grad mode, adapter and payload arrive unchanged."""
    payload = object()
    request = Request.next_token(
        torch.tensor([1, 2, 3]),
        trained=torch.tensor([False, False, True]),
        weight=2,
        no_grad=True,
        adapter="a",
        payload=payload,
    )
    assert request.labels is not None
    assert request.labels.tolist() == [IGNORED, 3, IGNORED]
    assert (request.weight, request.no_grad, request.adapter) == (2.0, True, "a")
    assert request.payload is payload


def test_a_mask_of_another_length_is_refused() -> None:
    """Both lengths are in the message."""
    with pytest.raises(RequestError, match="3 tokens, 2 entries") as caught:
        Request.next_token([1, 2, 3], trained=[True, False])
    assert caught.value.field == "trained"


def test_the_repr_shows_sizes_not_tokens() -> None:
    """Only what differs from the defaults is shown."""
    assert repr(Request(tokens=[1, 2, 3])) == "Request(3 tokens)"
    assert (
        repr(Request.next_token([1, 2, 3], weight=0.5, no_grad=True, adapter="a"))
        == "Request(3 tokens, 2 scored, weight=0.5, no_grad, adapter='a')"
    )
