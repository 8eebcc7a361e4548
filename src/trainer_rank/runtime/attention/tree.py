"""Tree attention as one autograd function: fused calls per run of the tree, merged by log-sum-exp.

Shape letters: P packed rows, H query heads, G key/value heads, D head size, B x T a bucket of leaves.

A row's softmax runs over its ancestors' keys and its own run's keys. Each fused call gives the part over one run of
keys as (out, lse); two parts merge exactly:

    lse = logaddexp(lse_1, lse_2)        out = out_1 + sigmoid(lse_2 - lse_1) * (out_2 - out_1)

(the identity of flash and ring attention: Dao et al., arXiv 2205.14135; Liu et al., arXiv 2310.01889). In backward
every call is given the *merged* out and lse: its weights are then ``exp(s - lse)``, the true softmax restricted to its
keys, and ``sum(grad * out)`` the true row sum, so the parts' gradients simply add.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer_rank.runtime.attention.kernels import Kernel
from trainer_rank.runtime.attention.plan import AttentionPlan, Block, Bucket
from trainer_rank.runtime.transfer import to_device


@dataclass(frozen=True, slots=True)
class BoundBucket:
    """A bucket with its index tensors on the device.

    ``slots`` (B * T,) row of each slot, ``valid`` (V,) flat slots that are not padding, ``valid_rows`` (V,) their rows;
    ``valid`` is None when nothing is padded.
    """

    bucket: Bucket
    slots: Tensor | None
    valid: Tensor | None
    valid_rows: Tensor | None


@dataclass(frozen=True, slots=True)
class BoundAttention:
    """An attention plan bound to a device and a kernel; shared by all layers of a pass."""

    plan: AttentionPlan
    kernel: Kernel
    buckets: tuple[BoundBucket, ...]
    begin: Callable[[str], None]

    @classmethod
    def bind(
        cls,
        plan: AttentionPlan,
        kernel: Kernel,
        device: torch.device,
        begin: Callable[[str], None] = lambda kind: None,
    ) -> BoundAttention:
        """Return the plan with its gather indices on ``device``; ``begin`` is told the kind of each call, or "" after.

        The calls come in the order of ``attention_calls``.
        """
        return cls(plan, kernel, tuple(_bind_bucket(bucket, device) for bucket in plan.buckets), begin)


def _bind_bucket(bucket: Bucket, device: torch.device) -> BoundBucket:
    if bucket.rows is None:
        return BoundBucket(bucket, None, None, None)
    flat = bucket.rows.reshape(-1)
    slots = to_device(flat, device)
    if bucket.lengths is None:
        return BoundBucket(bucket, slots, None, slots)
    valid = np.flatnonzero(np.arange(bucket.length)[None, :] < bucket.lengths[:, None])
    return BoundBucket(bucket, slots, to_device(valid, device), to_device(flat[valid], device))


def tree_attention(q: Tensor, k: Tensor, v: Tensor, bound: BoundAttention, scale: float) -> Tensor:
    """Return attention of every packed row over its own path to the root.

    Args:
        q: (1, H, P, D) queries, rotated by each row's own position.
        k: (1, G, P, D) keys; G divides H and is never repeated in memory.
        v: (1, G, P, D) values.
        bound: The plan of these P rows.
        scale: Factor on the logits, usually ``D ** -0.5``.

    Returns:
        (1, P, H, D) in the dtype of ``q``, contiguous.
    """
    result: Tensor = _TreeAttention.apply(q, k, v, bound, scale)  # type: ignore[no-untyped-call]
    return result


def _heads_first(rows: Tensor) -> Tensor:
    """(T, H, D) -> (1, H, T, D) view."""
    return rows.transpose(0, 1).unsqueeze(0)


def _call_forward(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Run the kernel on row-major (T, H, D) and (S, G, D); return row-major (out, lse)."""
    out, lse = kernel.forward(_heads_first(q), _heads_first(k), _heads_first(v), causal=causal, scale=scale)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def _call_backward(
    kernel: Kernel, inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the kernel's backward on row-major (grad, q, k, v, out, lse); return row-major (dq, dk, dv)."""
    grad, q, k, v, out = (_heads_first(x) for x in inputs[:5])
    lse = inputs[5].transpose(0, 1).unsqueeze(0)
    dq, dk, dv = kernel.backward(grad, q, k, v, out, lse, causal=causal, scale=scale)
    return dq[0].transpose(0, 1), dk[0].transpose(0, 1), dv[0].transpose(0, 1)


def _merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a part (T, H, D), (T, H) into rows in place; in reduced precision the mix is computed in float32."""
    weight = torch.sigmoid(part_lse - lse).unsqueeze(-1)
    torch.logaddexp(lse, part_lse, out=lse)
    if out.dtype == weight.dtype:
        out.lerp_(part, weight)
    else:
        out.copy_(torch.lerp(out.to(weight.dtype), part.to(weight.dtype), weight))


def block_calls(block: Block, kernel: Kernel) -> list[tuple[int, int, bool]]:
    """Return the kernel calls (query start, query stop, causal) of a block on its keys."""
    if kernel.top_left or block.reach == block.stop:
        return [(block.start, block.reach, True)]
    return [(block.start, block.stop, True), (block.stop, block.reach, False)]


def is_single_run(plan: AttentionPlan) -> bool:
    """Whether the whole pass is one causal run, which needs no buffers to merge into."""
    buckets = plan.buckets
    return not plan.blocks and len(buckets) == 1 and buckets[0].count == 1 and buckets[0].start is not None


def has_single_root(plan: AttentionPlan, kernel: Kernel) -> bool:
    """Whether one call has all rows as its queries: that of a root which everything descends from."""
    blocks = plan.blocks
    return kernel.top_left and bool(blocks) and blocks[0].start == 0 and blocks[0].reach == plan.num_rows


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bound: BoundAttention, scale: float) -> Tensor:
        q_rows, k_rows, v_rows = (x[0].transpose(0, 1) for x in (q, k, v))
        out, lse = _forward(q_rows, k_rows, v_rows, bound, scale)
        bound.begin("")
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.bound, ctx.scale = bound, scale
        return out.unsqueeze(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        q_rows, k_rows, v_rows = (x[0].transpose(0, 1) for x in (q, k, v))
        grads = _backward(grad[0].contiguous(), q_rows, k_rows, v_rows, out, lse, ctx.bound, ctx.scale)
        ctx.bound.begin("")
        dq, dk, dv = (_heads_first(x) for x in grads)
        return dq, dk, dv, None, None


def _forward(q: Tensor, k: Tensor, v: Tensor, bound: BoundAttention, scale: float) -> tuple[Tensor, Tensor]:
    """Return merged (out, lse) of shapes (P, H, D) and (P, H) from row-major (P, H|G, D) tensors."""
    blocks, kernel = bound.plan.blocks, bound.kernel
    if is_single_run(bound.plan):
        bound.begin("single")
        part, part_lse = _call_forward(kernel, q, k, v, causal=True, scale=scale)
        return part.contiguous(), part_lse.contiguous()
    if has_single_root(bound.plan, kernel):
        # The root's part covers all rows: it is the buffer that the others merge into.
        bound.begin("root")
        keys = slice(0, blocks[0].stop)
        part, part_lse = _call_forward(kernel, q, k[keys], v[keys], causal=True, scale=scale)
        out, lse = part.contiguous(), part_lse.contiguous()
        blocks = blocks[1:]
        del part, part_lse
    else:
        bound.begin("buffers")
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        accumulate = torch.float64 if q.dtype == torch.float64 else torch.float32
        lse = torch.empty(q.shape[:2], dtype=accumulate, device=q.device)
    for block in blocks:
        keys = slice(block.start, block.stop)
        for begin, end, causal in block_calls(block, kernel):
            bound.begin(block.kind)
            part, part_lse = _call_forward(kernel, q[begin:end], k[keys], v[keys], causal=causal, scale=scale)
            if block.first:
                out[begin:end], lse[begin:end] = part, part_lse
            else:
                _merge_(out[begin:end], lse[begin:end], part, part_lse)
            del part, part_lse
    for item in bound.buckets:
        bound.begin(item.bucket.kind)
        _forward_bucket(q, k, v, out, lse, item, kernel, scale)
    return out, lse


def _batched(rows: Tensor, item: BoundBucket) -> Tensor:
    """(P, H, D) -> (B, T, H, D): the bucket's rows, a view when they are consecutive."""
    bucket = item.bucket
    if item.slots is None:
        assert bucket.start is not None
        taken = rows[bucket.start : bucket.start + bucket.count * bucket.length]
    else:
        taken = rows.index_select(0, item.slots)
    return taken.reshape(bucket.count, bucket.length, *rows.shape[1:])


def _flat(batched: Tensor, item: BoundBucket) -> Tensor:
    """(B, H, T, ...) -> (valid slots, H, ...)."""
    flat = batched.transpose(1, 2).reshape(-1, batched.shape[1], *batched.shape[3:])
    return flat if item.valid is None else flat.index_select(0, item.valid)


def _forward_bucket(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, item: BoundBucket, kernel: Kernel, scale: float
) -> None:
    q_b, k_b, v_b = (_batched(x, item).transpose(1, 2) for x in (q, k, v))
    part, part_lse = kernel.forward(q_b, k_b, v_b, causal=True, scale=scale)
    bucket = item.bucket
    if item.slots is None:
        assert bucket.start is not None
        rows = slice(bucket.start, bucket.start + bucket.count * bucket.length)
        if bucket.first:
            out[rows], lse[rows] = _flat(part, item), _flat(part_lse, item)
        else:
            _merge_(out[rows], lse[rows], _flat(part, item), _flat(part_lse, item))
        return
    assert item.valid_rows is not None
    if bucket.first:
        out.index_copy_(0, item.valid_rows, _flat(part, item))
        lse.index_copy_(0, item.valid_rows, _flat(part_lse, item))
        return
    mixed, mixed_lse = out.index_select(0, item.valid_rows), lse.index_select(0, item.valid_rows)
    _merge_(mixed, mixed_lse, _flat(part, item), _flat(part_lse, item))
    out.index_copy_(0, item.valid_rows, mixed)
    lse.index_copy_(0, item.valid_rows, mixed_lse)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bound: BoundAttention, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv), row-major, from row-major tensors."""
    blocks, kernel = bound.plan.blocks, bound.kernel
    if is_single_run(bound.plan):
        bound.begin("single")
        return _call_backward(kernel, (grad, q, k, v, out, lse), causal=True, scale=scale)
    single_root = has_single_root(bound.plan, kernel)
    bound.begin("root" if single_root else "buffers")
    dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    if single_root:
        keys = slice(0, blocks[0].stop)
        dq, dk_part, dv_part = _call_backward(kernel, (grad, q, k[keys], v[keys], out, lse), causal=True, scale=scale)
        dq, dk[keys], dv[keys] = dq.contiguous(), dk_part, dv_part
        blocks = blocks[1:]
        del dk_part, dv_part
    else:
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    for block in blocks:
        keys = slice(block.start, block.stop)
        for number, (begin, end, causal) in enumerate(block_calls(block, kernel)):
            bound.begin(block.kind)
            queries = slice(begin, end)
            dq_part, dk_part, dv_part = _call_backward(
                kernel,
                (grad[queries], q[queries], k[keys], v[keys], out[queries], lse[queries]),
                causal=causal,
                scale=scale,
            )
            if block.first:
                dq[begin:end] = dq_part
            else:
                dq[begin:end] += dq_part
            # A run's keys are met by this block alone: its own rows and all rows below it are the block's queries.
            if number == 0:
                dk[keys], dv[keys] = dk_part, dv_part
            else:
                dk[keys] += dk_part
                dv[keys] += dv_part
            del dq_part, dk_part, dv_part
    for item in bound.buckets:
        bound.begin(item.bucket.kind)
        _backward_bucket(grad, q, k, v, out, lse, (dq, dk, dv), item, kernel, scale)
    return dq, dk, dv


def _backward_bucket(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    item: BoundBucket,
    kernel: Kernel,
    scale: float,
) -> None:
    dq, dk, dv = grads
    bucket = item.bucket
    grad_b, q_b, k_b, v_b, out_b, lse_b = (_batched(x, item).transpose(1, 2) for x in (grad, q, k, v, out, lse))
    if item.valid is not None:
        # Padded slots repeat a real row; with a zero gradient and the key behind every real query they add nothing.
        live = torch.zeros(bucket.count * bucket.length, dtype=grad.dtype, device=grad.device)
        live.index_fill_(0, item.valid, 1)
        grad_b = grad_b * live.view(bucket.count, 1, bucket.length, 1)
    parts = kernel.backward(grad_b, q_b, k_b, v_b, out_b, lse_b, causal=True, scale=scale)
    dq_part, dk_part, dv_part = (_flat(part, item) for part in parts)
    if item.slots is None:
        assert bucket.start is not None
        rows = slice(bucket.start, bucket.start + bucket.count * bucket.length)
        if bucket.first:
            dq[rows] = dq_part
        else:
            dq[rows] += dq_part
        dk[rows], dv[rows] = dk_part, dv_part
    else:
        assert item.valid_rows is not None
        if bucket.first:
            dq.index_copy_(0, item.valid_rows, dq_part)
        else:
            dq.index_add_(0, item.valid_rows, dq_part)
        dk.index_copy_(0, item.valid_rows, dk_part)
        dv.index_copy_(0, item.valid_rows, dv_part)
