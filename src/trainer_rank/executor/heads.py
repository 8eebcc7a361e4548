"""Log-probs of labels and of the likeliest tokens from hidden states: needed rows only, one chunk of rows at a time.

Shape letters: R head rows, H hidden size, V vocabulary, M labels, C rows of one chunk, T ranked rows, k tokens of each.

At most one (C, V) block of logits is alive at any time, in forward and in backward.

With a frozen projection W the gradient needs no second pass over the vocabulary. For a label y on row r

    d logp / d h_r = W[y] - sum_v softmax(h_r W^T)_v W[v] = W[y] - e_r

and e_r, (R, H), is computed while the chunk's logits exist; it is saved in place of the hidden rows. When W is trained
itself, the chunk's logits are computed again in backward. The k likeliest tokens of a row are k labels that are found
on the way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
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
        top_row: (T,) int64, head row of each ranked row, ascending; None when none is ranked.
        top_k: k.
        top_chunks: (start, stop) of each chunk's ranked rows.
        begin: Told ``chunk`` as each chunk begins, in forward and in backward, and "" after the last.
    """

    label_row: Tensor
    label: Tensor
    chunks: tuple[tuple[int, int, int, int], ...]
    top_row: Tensor | None = None
    top_k: int = 0
    top_chunks: tuple[tuple[int, int], ...] = ()
    begin: Callable[[str], None] = lambda kind: None


def chunk_bounds(label_row: NDArray[np.int64], num_rows: int, chunk_rows: int) -> tuple[tuple[int, int, int, int], ...]:
    """Return the row range of each chunk and the range of labels scored on it.

    Chunks are evened out: 1,025 rows at 1,024 a chunk make 513 and 512, so the peak is not paid for a chunk of one.
    """
    count = -(-num_rows // chunk_rows)
    edges = [num_rows * number // count for number in range(count + 1)] if count else [0]
    labels = np.searchsorted(label_row, edges).tolist()
    return tuple(zip(edges[:-1], edges[1:], labels[:-1], labels[1:], strict=True))


def top_bounds(top_row: NDArray[np.int64], chunks: Sequence[tuple[int, int, int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the range of ranked rows that lie in each chunk."""
    edges = np.searchsorted(top_row, [start for start, *_ in chunks] + [chunks[-1][1]] if chunks else [0]).tolist()
    return tuple(itertools.pairwise(edges))


def label_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, index: LabelIndex
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the log-prob of each label, and the likeliest tokens where they are asked for.

    Args:
        hidden: (R, H) final hidden states of the head rows.
        weight: (V, H) vocabulary projection.
        bias: (V,) or None.
        index: The labels.

    Returns:
        (M,) log-probs, (T, k) log-probs in descending order, and their (T, k) int64 token ids; the latter two are None
        when nothing is ranked. Log-probs are float32, or float64 for float64 inputs.
    """
    result: tuple[Tensor, Tensor | None, Tensor | None] = _LabelLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, index
    )
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
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, index: LabelIndex
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        needs_hidden, needs_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        logprobs = torch.empty(index.label.shape, dtype=_wide(hidden.dtype), device=hidden.device)
        expected = torch.empty_like(hidden) if needs_hidden and not needs_weight else None
        ranking = None if index.top_row is None else _Ranking(index, logprobs.dtype)
        for number, (start, stop, first, last) in enumerate(index.chunks):
            index.begin("chunk")
            logits = _shifted_logits(hidden[start:stop], weight, bias)
            row = index.label_row[first:last] - start
            picked = logits[row, index.label[first:last]]
            if ranking is not None:
                ranking.rank(number, logits)
            exp = logits.exp_()
            total = exp.sum(-1, keepdim=True)
            logprobs[first:last] = picked.sub_(total.log()[:, 0].index_select(0, row))
            if ranking is not None:
                ranking.normalise(number, total)
            if expected is not None:
                expected[start:stop] = torch.mm(exp.to(weight.dtype), weight).div_(total)
            # Without this the next chunk's logits would be computed beside these.
            del logits, exp, total, row, picked
        index.begin("")
        ctx.set_materialize_grads(False)
        ctx.index = index
        ctx.frozen = expected is not None
        ids = None if ranking is None else ranking.ids
        ctx.save_for_backward(expected if ctx.frozen else hidden, weight, bias, ids)
        if ranking is None or ids is None:
            return logprobs, None, None
        ctx.mark_non_differentiable(ids)
        return logprobs, ranking.values, ids

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_top: Tensor | None, _: None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        saved, weight, bias, ids = ctx.saved_tensors
        grads = _HeadGrads(ctx.index, grad, grad_top, ids)
        if ctx.frozen:
            return _backward_frozen(grads, saved, weight), None, None, None
        return (*_backward_trained(grads, saved, weight, bias, ctx.needs_input_grad), None)


class _Ranking:
    """The likeliest tokens of the ranked rows, filled chunk by chunk."""

    def __init__(self, index: LabelIndex, dtype: torch.dtype) -> None:
        assert index.top_row is not None, "only for a head that ranks rows"
        self._rows = index.top_row
        self._bounds = index.top_chunks
        self._chunks = index.chunks
        shape = (self._rows.shape[0], index.top_k)
        self.values = torch.empty(shape, dtype=dtype, device=self._rows.device)
        self.ids = torch.empty(shape, dtype=torch.int64, device=self._rows.device)

    def rank(self, number: int, logits: Tensor) -> None:
        """Take the largest logits of a chunk's ranked rows."""
        first, last = self._bounds[number]
        if first < last:
            block = logits.index_select(0, self._rows[first:last] - self._chunks[number][0])
            values, ids = block.topk(self.ids.shape[1])
            self.values[first:last] = values
            self.ids[first:last] = ids

    def normalise(self, number: int, total: Tensor) -> None:
        """Turn the logits of a chunk's ranked rows into log-probs; ``total`` is (C, 1), the sums of exponentials."""
        first, last = self._bounds[number]
        if first < last:
            row = self._rows[first:last] - self._chunks[number][0]
            self.values[first:last] -= total.log().index_select(0, row)


class _HeadGrads:
    """Gradients of log-probs: of the labels' (M,) and of the ranked tokens' (T, k), either may be None."""

    def __init__(self, index: LabelIndex, labels: Tensor | None, top: Tensor | None, ids: Tensor | None) -> None:
        self.index = index
        self.labels = labels
        self.top = top
        self._ids = ids

    def per_row(self, num_rows: int) -> Tensor:
        """Return (R,) the sum of the gradients on each row."""
        some = self.labels if self.labels is not None else self.top
        assert some is not None, "autograd calls no backward without a gradient"
        total = torch.zeros(num_rows, dtype=some.dtype, device=some.device)
        if self.labels is not None:
            total.index_add_(0, self.index.label_row, self.labels)
        if self.top is not None and self.index.top_row is not None:
            total.index_add_(0, self.index.top_row, self.top.sum(1))
        return total

    def parts(self, number: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield (head rows (A,), token ids (A,), gradients (A,)) of a chunk, no more than a chunk's labels at a time.

        A row comes with one of its k tokens at a time, so that memory does not grow with k.
        """
        _, _, first, last = self.index.chunks[number]
        if self.labels is not None:
            yield self.index.label_row[first:last], self.index.label[first:last], self.labels[first:last]
        if self.top is None or self.index.top_row is None or self._ids is None:
            return
        first, last = self.index.top_chunks[number]
        if first < last:
            for place in range(self.index.top_k):
                ids, grad = self._ids[first:last, place], self.top[first:last, place]
                yield self.index.top_row[first:last], ids, grad


def _backward_frozen(grads: _HeadGrads, expected: Tensor, weight: Tensor) -> Tensor:
    per_row = grads.per_row(expected.shape[0]).to(expected.dtype).neg_().unsqueeze(-1)
    grad_hidden = expected * per_row
    for number in range(len(grads.index.chunks)):
        grads.index.begin("chunk")
        for where, ids, grad in grads.parts(number):
            rows = weight.index_select(0, ids)
            rows *= grad.to(rows.dtype).unsqueeze(-1)
            grad_hidden.index_add_(0, where, rows)
            del rows
    grads.index.begin("")
    return grad_hidden


def _backward_trained(
    grads: _HeadGrads, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    grad_hidden = torch.empty_like(hidden) if needs[0] else None
    grad_weight = torch.zeros_like(weight) if needs[1] else None
    grad_bias = torch.zeros_like(bias) if bias is not None and needs[2] else None
    for start, stop, grad_logits in _grad_logits(grads, hidden, weight, bias):
        if grad_hidden is not None:
            torch.mm(grad_logits, weight, out=grad_hidden[start:stop])
        if grad_weight is not None:
            grad_weight.addmm_(grad_logits.t(), hidden[start:stop])
        if grad_bias is not None:
            grad_bias += grad_logits.sum(0)
        del grad_logits
    return grad_hidden, grad_weight, grad_bias


def _grad_logits(
    grads: _HeadGrads, hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (row start, row stop, gradient of the chunk's logits (C, V)): the labels' less the softmax's share."""
    per_row = grads.per_row(hidden.shape[0])
    for number, (start, stop, _, _) in enumerate(grads.index.chunks):
        grads.index.begin("chunk")
        exp = _shifted_logits(hidden[start:stop], weight, bias).exp_()
        exp *= per_row[start:stop].neg().unsqueeze(-1) / exp.sum(-1, keepdim=True)
        for where, ids, grad in grads.parts(number):
            row = where - start
            exp.index_put_((row, ids), grad, accumulate=True)
            del row
        narrow = exp.to(weight.dtype)
        del exp
        yield start, stop, narrow
        del narrow
    grads.index.begin("")
