"""aten's fused CUDA attention kernels: flash for half precision, memory-efficient for float32.

Shape letters: B batch, H query heads, G key/value heads (G divides H), T query rows, S key rows, D head size.

On ``meta`` what a kernel allocates inside is allocated and dropped (``cuda_scratch``), so that a dry run sees the same
peak. Backward takes many short sequences in several calls, because each is padded in float32 to a whole tile of rows: a
thousand one-token branches would otherwise need 2 GiB for a moment.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from trainer_rank.errors import UnsupportedModelError
from trainer_rank.runtime.attention.cuda_scratch import (
    FLASH_ROWS,
    CallSizes,
    efficient_backward_bytes,
    flash_backward_bytes,
    flash_forward_at_most,
    flash_forward_bytes,
    round_up,
)
from trainer_rank.runtime.attention.kernels import Kernel, allocate, call_sizes

_aten = torch.ops.aten

# Padded rows of one backward call: 256 MiB of float32 query gradient with 32 heads of 128, and far more than enough
# blocks to fill a device.
_MOST_BACKWARD_ROWS: Final = 1 << 14

# The memory-efficient kernel reads and writes the log-sum-exp in rows of a multiple of this.
_EFFICIENT_LSE_ALIGNMENT: Final = 32

_Grads = tuple[Tensor, Tensor, Tensor]


class _CudaKernel(Kernel):
    """A kernel whose backward takes only so many sequences at a time as their padded rows allow."""

    one_is_a_view = True

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> _Grads:
        inputs = grad, q, k, v, out, lse
        step = _sequences_at_once(q.shape[2])
        parts = [
            self._backward(*(x[first : first + step] for x in inputs), causal=causal, scale=scale)
            for first in range(0, q.shape[0], step)
        ]
        dq, dk, dv = parts[0] if len(parts) == 1 else (torch.cat(part) for part in zip(*parts, strict=True))
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    def takes_at_once(self, sizes: CallSizes) -> bool:
        return sizes.batch <= _sequences_at_once(sizes.queries)

    @abstractmethod
    def _backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> _Grads:
        """Run one call on (B, H|G, T|S, D); return dq, dk and dv as (B, T|S, H|G, D)."""


@dataclass(frozen=True, slots=True)
class CudaFlashKernel(_CudaKernel):
    """aten's CUDA flash attention: float16 and bfloat16, fewer key/value heads natively, bottom-right causal.

    Args:
        multiprocessors: Of the device; they decide when the kernel splits its keys.
    """

    multiprocessors: int
    name = "cuda-flash"
    top_left = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        _check_head_size(q, multiple=8, most=256)
        # The (B, T, H, D) entry point takes G < H; scaled_dot_product's own wrapper does not on every release.
        out, lse, *_ = _aten._flash_attention_forward(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, None,
            q.shape[2], k.shape[2], 0.0, causal, False, scale=scale,
        )  # fmt: skip
        if q.is_meta:
            allocate(self.forward_scratch_bytes(call_sizes(q, k), q.dtype), q)
        return out.transpose(1, 2), lse

    def _backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> _Grads:
        # Dropout is off, so the random state is read by nobody; the operator still wants the two tensors.
        state = torch.empty(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty((), dtype=torch.uint64, device=q.device)
        # No cumulative lengths: the sequences are a dense batch. Copies, if any, live as long as the call.
        rows = _RowMajor.of(grad, out, lse)
        grads: _Grads = _aten._flash_attention_backward(
            rows.grad, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), rows.out, rows.lse, None, None,
            q.shape[2], k.shape[2], 0.0, causal, state, unused, scale=scale,
        )  # fmt: skip
        if q.is_meta:
            allocate(self.backward_scratch_bytes(call_sizes(q, k), q.dtype), q)
        return grads

    def forward_scratch_bytes(self, sizes: CallSizes, dtype: torch.dtype) -> int:
        # At least one byte: a forward that splits no keys then makes as many allocations as one that does.
        return max(1, flash_forward_bytes(sizes, self.multiprocessors))

    def forward_scratch_at_most(self, sizes: CallSizes, dtype: torch.dtype) -> int:
        return max(
            self.forward_scratch_bytes(sizes, dtype),
            flash_forward_at_most(keys=sizes.keys, head_size=sizes.head_size, multiprocessors=self.multiprocessors),
        )

    def backward_scratch_bytes(self, sizes: CallSizes, dtype: torch.dtype) -> int:
        return flash_backward_bytes(
            sizes, self.multiprocessors, itemsize=dtype.itemsize, deterministic=_deterministic()
        )


@dataclass(frozen=True, slots=True)
class CudaEfficientKernel(_CudaKernel):
    """aten's CUDA memory-efficient attention for float32: key/value heads are repeated per call, top-left causal."""

    name = "cuda-efficient"
    top_left = True
    row_alignment = _EFFICIENT_LSE_ALIGNMENT

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        _check_head_size(q, multiple=4, most=1 << 16)
        groups = q.shape[1] // k.shape[1]
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            q, _repeat(k, groups), _repeat(v, groups), None, True, 0.0, causal, scale=scale
        )
        return out, lse[:, :, : q.shape[2]]

    def _backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> _Grads:
        groups = q.shape[1] // k.shape[1]
        keys, values = _repeat(k, groups), _repeat(v, groups)
        full = lse.new_full((*lse.shape[:2], round_up(q.shape[2], _EFFICIENT_LSE_ALIGNMENT)), float("inf"))
        full[:, :, : q.shape[2]] = lse
        zero = torch.zeros((), dtype=torch.int64, device=q.device)
        # The kernel takes the row stride of ``out`` to be H * D without looking.
        rows = _RowMajor.of(grad, out, full)
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            rows.grad.transpose(1, 2), q, keys, values, None, rows.out.transpose(1, 2), rows.lse, zero, zero, 0.0,
            [True, True, True, False], causal, scale=scale,
        )  # fmt: skip
        if q.is_meta:
            allocate(self.backward_scratch_bytes(call_sizes(q, k), q.dtype), q)
        del keys, values, full, rows
        return dq.transpose(1, 2), _fold(dk.transpose(1, 2), groups), _fold(dv.transpose(1, 2), groups)

    def forward_scratch_bytes(self, sizes: CallSizes, dtype: torch.dtype) -> int:
        return 0

    def backward_scratch_bytes(self, sizes: CallSizes, dtype: torch.dtype) -> int:
        return efficient_backward_bytes(sizes)


@dataclass(frozen=True, slots=True)
class _RowMajor:
    """What the backward kernels want contiguous: grad and out (B, T, H, D), lse (B, H, T)."""

    grad: Tensor
    out: Tensor
    lse: Tensor

    @classmethod
    def of(cls, grad: Tensor, out: Tensor, lse: Tensor) -> _RowMajor:
        """Return contiguous tensors from grad and out (B, H, T, D) and lse; copies only where they are not yet."""
        return cls(grad.transpose(1, 2).contiguous(), out.transpose(1, 2).contiguous(), lse.contiguous())


def _sequences_at_once(queries: int) -> int:
    """Return how many sequences of so many queries one backward call takes."""
    return max(1, _MOST_BACKWARD_ROWS // round_up(queries, FLASH_ROWS))


def _deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _repeat(heads: Tensor, groups: int) -> Tensor:
    """(B, G, S, D) -> (B, G * groups, S, D)."""
    return heads if groups == 1 else heads.repeat_interleave(groups, 1)


def _fold(grad: Tensor, groups: int) -> Tensor:
    """(B, S, G * groups, D) -> (B, S, G, D), summed over the heads of a group."""
    return grad if groups == 1 else grad.unflatten(2, (-1, groups)).sum(3)


def _check_head_size(q: Tensor, *, multiple: int, most: int) -> None:
    size = q.shape[3]
    if size % multiple or size > most:
        raise UnsupportedModelError(
            layer="attention",
            reason=f"CUDA's kernel for {str(q.dtype).removeprefix('torch.')} takes head sizes that are multiples of "
            f"{multiple} up to {most}, not {size}",
            next_step="Load the model in another dtype, or run it on the CPU",
        )
