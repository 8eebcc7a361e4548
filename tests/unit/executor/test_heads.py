"""Chunked label log-probs against log-softmax over all logits: outputs and gradients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer_rank.executor.heads import LabelIndex, chunk_bounds, label_logprobs, top_bounds

HIDDEN, VOCABULARY = 6, 11


@dataclass(frozen=True)
class Case:
    """R head rows, M labels on them, and a cotangent."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    label_row: Tensor
    label: Tensor
    grad: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that want a gradient."""
        return [x for x in (self.hidden, self.weight, self.bias) if x is not None and x.requires_grad]

    def chunked(self, chunk_rows: int) -> list[Tensor]:
        """Return log-probs and gradients of the library's head."""
        rows = self.label_row.numpy()
        index = LabelIndex(
            label_row=self.label_row,
            label=self.label,
            chunks=chunk_bounds(rows, self.hidden.shape[0], chunk_rows),
        )
        return self._with_grads(label_logprobs(self.hidden, self.weight, self.bias, index)[0])

    def naive(self) -> list[Tensor]:
        """Return the same from log-softmax over all logits in the inputs' dtype, at least float32."""
        logits = self.hidden @ self.weight.t()
        if self.bias is not None:
            logits = logits + self.bias
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return self._with_grads(wide.log_softmax(-1)[self.label_row, self.label])

    def _with_grads(self, logprobs: Tensor) -> list[Tensor]:
        if not self.leaves:
            return [logprobs]
        return [logprobs.detach(), *torch.autograd.grad(logprobs, self.leaves, self.grad.to(logprobs.dtype))]


def case(
    *label_rows: int,
    rows: int,
    trained: str = "hidden",
    bias: bool = False,
    dtype: torch.dtype = torch.float64,
    spread: float = 1.0,
) -> Case:
    """Return a random case with labels on ``label_rows``; ``trained`` names what wants a gradient."""
    torch.manual_seed(rows + len(label_rows))

    def leaf(name: str, *shape: int) -> Tensor:
        tensor = (spread * torch.randn(*shape, dtype=torch.float64)).to(dtype)
        return tensor.requires_grad_(name in trained.split("+"))

    return Case(
        hidden=leaf("hidden", rows, HIDDEN),
        weight=leaf("weight", VOCABULARY, HIDDEN),
        bias=leaf("bias", VOCABULARY) if bias else None,
        label_row=torch.tensor(sorted(label_rows), dtype=torch.int64),
        label=torch.randint(VOCABULARY, (len(label_rows),)),
        grad=torch.randn(len(label_rows), dtype=torch.float64),
    )


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-12) -> None:
    """Assert equal outputs and gradients."""
    assert len(found) == len(expected) >= 1
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunk_rows", range(1, 8))
@pytest.mark.parametrize(
    ("trained", "bias"),
    [
        ("hidden", False),
        ("hidden", True),
        ("hidden+weight", False),
        ("hidden+weight+bias", True),
        ("hidden+bias", True),
        ("weight", False),
        ("bias", True),
    ],
)
def test_any_chunk_size_gives_log_softmax_and_its_gradient(chunk_rows: int, trained: str, bias: bool) -> None:
    """From one row at a time to all seven, frozen or trained projection, with and without bias."""
    head = case(0, 1, 2, 3, 4, 5, 6, rows=7, trained=trained, bias=bias)
    assert_close(head.chunked(chunk_rows), head.naive())


@pytest.mark.parametrize("trained", ["hidden", "hidden+weight"])
@pytest.mark.parametrize("chunk_rows", [1, 2, 3])
def test_several_labels_may_be_scored_on_one_row(trained: str, chunk_rows: int) -> None:
    """A branch point's row serves every branch; their gradients add."""
    head = case(0, 1, 1, 1, 1, 2, 2, rows=3, trained=trained)
    assert_close(head.chunked(chunk_rows), head.naive())


@pytest.mark.parametrize("trained", ["hidden", "hidden+weight"])
def test_equal_labels_on_one_row_add_their_gradients(trained: str) -> None:
    """Duplicates score the same token on the same row."""
    head = case(0, 0, 0, rows=1, trained=trained)
    head.label.fill_(4)
    assert_close(head.chunked(1), head.naive())


@given(
    rows=st.integers(1, 9),
    chunk_rows=st.integers(1, 10),
    extra=st.lists(st.integers(0, 8), max_size=8),
    trained=st.sampled_from(["hidden", "hidden+weight", "weight"]),
)
@settings(max_examples=40, deadline=None)
def test_any_labels_on_any_rows(rows: int, chunk_rows: int, extra: list[int], trained: str) -> None:
    """Rows may carry no label, one or many, whatever the chunks."""
    head = case(0, *(row for row in extra if row < rows), rows=rows, trained=trained)
    assert_close(head.chunked(chunk_rows), head.naive())


@pytest.mark.parametrize("trained", ["hidden", "hidden+weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_log_probs_are_float32_or_wider_and_gradients_keep_their_dtype(dtype: torch.dtype, trained: str) -> None:
    """bfloat16 models get float32 log-probs, float64 models float64."""
    head = case(0, 1, 1, 2, rows=3, dtype=dtype, trained=trained)
    found = head.chunked(2)
    assert found[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert [x.dtype for x in found[1:]] == [dtype] * len(head.leaves)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.03}[dtype]
    assert_close(found, head.naive(), tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("trained", ["hidden", "hidden+weight"])
def test_a_label_far_below_the_maximum_keeps_a_finite_log_prob(dtype: torch.dtype, trained: str) -> None:
    """A probability that underflows to 0 is still a log-prob of its logit less the maximum, not -inf."""
    head = case(0, 1, rows=2, dtype=dtype, trained=trained)
    with torch.no_grad():
        head.hidden.copy_(torch.tensor([[40.0, 0, 0, 0, 0, 0]] * 2))
        head.weight.zero_()
        head.weight[3, 0] = 50.0
    head.label.copy_(torch.tensor([3, 5]))
    found = head.chunked(1)
    assert found[0].tolist() == [0.0, -2000.0]
    assert all(bool(x.isfinite().all()) for x in found)
    assert_close(found, head.naive(), 1e-5)


def test_large_logits_do_not_overflow() -> None:
    """Logits beyond the exponent range of float32 are shifted by their row maximum first."""
    head = case(0, 1, 2, rows=3, dtype=torch.float32, spread=30.0, trained="hidden+weight")
    found = head.chunked(2)
    assert all(bool(x.isfinite().all()) for x in found)
    assert_close(found, head.naive(), 1e-3)


def test_a_frozen_head_returns_no_gradient_for_its_projection() -> None:
    """The weight of a frozen head gets none, not zeros."""
    head = case(0, rows=1)
    _, gradient = head.chunked(1)
    assert gradient.shape == head.hidden.shape
    assert head.weight.grad is None


def test_gradients_of_some_labels_only_are_those_of_their_rows() -> None:
    """A zero cotangent on a label leaves its row without a gradient."""
    head = case(0, 1, rows=2)
    head.grad[0] = 0
    _, gradient = head.chunked(2)
    assert gradient[0].tolist() == [0.0] * HIDDEN
    assert float(gradient[1].abs().sum()) > 0


@given(num_rows=st.integers(0, 60), chunk_rows=st.integers(1, 70), labels=st.lists(st.integers(0, 59)))
def test_chunks_are_even_and_own_their_labels(num_rows: int, chunk_rows: int, labels: list[int]) -> None:
    """Chunks tile the rows, none exceeds the limit, sizes differ by one at most, and labels fall into their chunk."""
    label_row = np.array(sorted(label for label in labels if label < num_rows), dtype=np.int64)
    chunks = chunk_bounds(label_row, num_rows, chunk_rows)
    assert [row for start, stop, _, _ in chunks for row in range(start, stop)] == list(range(num_rows))
    assert [n for _, _, first, last in chunks for n in range(first, last)] == list(range(label_row.size))
    sizes = [stop - start for start, stop, _, _ in chunks]
    assert all(0 < size <= chunk_rows for size in sizes)
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert len(chunks) == -(-num_rows // chunk_rows)
    assert all(start <= row < stop for start, stop, first, last in chunks for row in label_row[first:last])


def test_a_row_beyond_the_limit_evens_the_chunks_out() -> None:
    """1,025 rows at 1,024 a chunk make 512 and 513, not 1,024 and 1."""
    chunks = chunk_bounds(np.empty(0, dtype=np.int64), 1025, 1024)
    assert [stop - start for start, stop, _, _ in chunks] == [512, 513]


@pytest.mark.parametrize("trained", ["hidden", "weight", "hidden+weight+bias"])
@pytest.mark.parametrize("chunk_rows", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("top_rows", [(0,), (2, 3, 6), tuple(range(7))])
@pytest.mark.parametrize("with_labels", [True, False])
def test_ranked_tokens_are_those_of_the_whole_softmax(
    trained: str, chunk_rows: int, top_rows: tuple[int, ...], with_labels: bool
) -> None:
    """Values, ids and gradients, beside labels and alone, whatever the chunks."""
    one = case(*((0, 2, 2, 5) if with_labels else ()), rows=7, trained=trained, bias=True)
    chunks = chunk_bounds(one.label_row.numpy(), 7, chunk_rows)
    top = torch.tensor(top_rows)
    index = LabelIndex(
        label_row=one.label_row, label=one.label, chunks=chunks, top_row=top, top_k=4,
        top_chunks=top_bounds(top.numpy(), chunks),
    )  # fmt: skip
    logprobs, values, ids = label_logprobs(one.hidden, one.weight, one.bias, index)
    assert one.bias is not None
    naive = (one.hidden @ one.weight.t() + one.bias).log_softmax(-1)
    wanted = naive[top].topk(4)
    assert values is not None
    assert ids is not None
    assert torch.equal(ids, wanted.indices)
    torch.testing.assert_close(values, wanted.values)
    weights = torch.randn(values.shape, dtype=values.dtype)
    both = [(values, wanted.values, weights)]
    if with_labels:
        both.append((logprobs, naive[one.label_row, one.label], one.grad))
    for pairs in (both, both[:1], both[1:]):
        if not pairs:
            continue
        found = torch.autograd.grad([a for a, _, _ in pairs], one.leaves, [g for *_, g in pairs], retain_graph=True)
        known = torch.autograd.grad([b for _, b, _ in pairs], one.leaves, [g for *_, g in pairs], retain_graph=True)
        for a, b in zip(found, known, strict=True):
            torch.testing.assert_close(a, b)
