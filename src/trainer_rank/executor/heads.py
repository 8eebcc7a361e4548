"""Log-probs of labels from hidden states: needed rows only, one chunk of rows at a time.

Shape letters: R head rows, H hidden size, V vocabulary, M labels, C rows of one chunk.

At most one (C, V) block of logits is alive at any time, in forward and in backward.

With a frozen projection W the gradient needs no second pass over the vocabulary. For a label y on row r

    d logp / d h_r = W[y] - sum_v softmax(h_r W^T)_v W[v] = W[y] - e_r

and e_r, (R, H), is computed while the chunk's logits exist; it is saved in place of the hidden rows. When W is trained
itself, the chunk's logits are computed again in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LabelIndex:
    """Labels bound to a device.

    Attributes:
        label_row: (M,) int64, head row of each label, ascending.
        label: (M,) int64 token ids.
        chunks: (row start, row stop, label start, label stop) of each chunk.
        begin: Told ``chunk`` as each chunk begins, in forward and in backward, and "" after the last.
    """

    label_row: Tensor
    label: Tensor
    chunks: tuple[tuple[int, int, int, int], ...]
    begin: Callable[[str], None] = lambda kind: None


def chunk_bounds(label_row: NDArray[np.int64], num_rows: int, chunk_rows: int) -> tuple[tuple[int, int, int, int], ...]:
    """Return the row range of each chunk and the range of labels scored on it.

    Chunks are evened out: 1,025 rows at 1,024 a chunk make 513 and 512, so the peak is not paid for a chunk of one.
    """
    count = -(-num_rows // chunk_rows)
    edges = [num_rows * number // count for number in range(count + 1)] if count else [0]
    labels = np.searchsorted(label_row, edges).tolist()
    return tuple(zip(edges[:-1], edges[1:], labels[:-1], labels[1:], strict=True))


def label_logprobs(hidden: Tensor, weight: Tensor, bias: Tensor | None, index: LabelIndex) -> Tensor:
    """Return the log-prob of each label.

    Args:
        hidden: (R, H) final hidden states of the head rows.
        weight: (V, H) vocabulary projection.
        bias: (V,) or None.
        index: The labels.

    Returns:
        (M,) float32, or float64 for float64 inputs.
    """
    result: Tensor = _LabelLogprobs.apply(hidden, weight, bias, index)  # type: ignore[no-untyped-call]
    return result


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype log-probs are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _shifted_logits(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return logits less their row maximum, (C, V) in the dtype log-probs are computed in."""
    logits = torch.mm(rows, weight.t())
    if bias is not None:
        logits += bias
    logits = logits.to(_wide(logits.dtype))
    return logits.sub_(logits.amax(-1, keepdim=True))


class _LabelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, index: LabelIndex) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        logprobs = torch.empty(index.label.shape, dtype=_wide(hidden.dtype), device=hidden.device)
        expected = torch.empty_like(hidden) if needs_hidden and not needs_weight else None
        for start, stop, first, last in index.chunks:
            index.begin("chunk")
            logits = _shifted_logits(hidden[start:stop], weight, bias)
            row = index.label_row[first:last] - start
            picked = logits[row, index.label[first:last]]
            exp = logits.exp_()
            total = exp.sum(-1, keepdim=True)
            logprobs[first:last] = picked.sub_(total.log()[:, 0].index_select(0, row))
            if expected is not None:
                expected[start:stop] = torch.mm(exp.to(weight.dtype), weight).div_(total)
            # Without this the next chunk's logits would be computed beside these.
            del logits, exp, total, row, picked
        index.begin("")
        ctx.index = index
        ctx.frozen = expected is not None
        ctx.save_for_backward(expected if ctx.frozen else hidden, weight, bias)
        return logprobs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        saved, weight, bias = ctx.saved_tensors
        if ctx.frozen:
            return _backward_frozen(grad, saved, weight, ctx.index), None, None, None
        return (*_backward_trained(grad, saved, weight, bias, ctx.index, ctx.needs_input_grad), None)


def _per_row(grad: Tensor, index: LabelIndex, num_rows: int) -> Tensor:
    """(M,) -> (R,): the sum of the labels' gradients on each row."""
    return torch.zeros(num_rows, dtype=grad.dtype, device=grad.device).index_add_(0, index.label_row, grad)


def _backward_frozen(grad: Tensor, expected: Tensor, weight: Tensor, index: LabelIndex) -> Tensor:
    per_row = _per_row(grad, index, expected.shape[0]).to(expected.dtype).neg_().unsqueeze(-1)
    grad_hidden = expected * per_row
    for _, _, first, last in index.chunks:
        index.begin("chunk")
        rows = weight.index_select(0, index.label[first:last])
        rows *= grad[first:last].to(rows.dtype).unsqueeze(-1)
        grad_hidden.index_add_(0, index.label_row[first:last], rows)
        del rows
    index.begin("")
    return grad_hidden


def _backward_trained(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, index: LabelIndex, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    grad_hidden = torch.empty_like(hidden) if needs[0] else None
    grad_weight = torch.zeros_like(weight) if needs[1] else None
    grad_bias = torch.zeros_like(bias) if bias is not None and needs[2] else None
    per_row = _per_row(grad, index, hidden.shape[0])
    for start, stop, grad_logits in _grad_logits(grad, per_row, hidden, weight, bias, index):
        if grad_hidden is not None:
            torch.mm(grad_logits, weight, out=grad_hidden[start:stop])
        if grad_weight is not None:
            grad_weight.addmm_(grad_logits.t(), hidden[start:stop])
        if grad_bias is not None:
            grad_bias += grad_logits.sum(0)
        del grad_logits
    return grad_hidden, grad_weight, grad_bias


def _grad_logits(
    grad: Tensor, per_row: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, index: LabelIndex
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (row start, row stop, gradient of the chunk's logits (C, V)): the labels' less the softmax's share."""
    for start, stop, first, last in index.chunks:
        index.begin("chunk")
        exp = _shifted_logits(hidden[start:stop], weight, bias).exp_()
        exp *= per_row[start:stop].neg().unsqueeze(-1) / exp.sum(-1, keepdim=True)
        row = index.label_row[first:last] - start
        exp.index_put_((row, index.label[first:last]), grad[first:last], accumulate=True)
        narrow = exp.to(weight.dtype)
        del exp, row
        yield start, stop, narrow
        del narrow
    index.begin("")
