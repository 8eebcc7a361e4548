"""Fused attention kernels that return the log-sum-exp and accept a merged one in backward.

Shape letters: B batch, H query heads, G key/value heads (G divides H), T query rows, S key rows, D head size.

``torch.nn.functional.scaled_dot_product_attention`` is never called: it hides the log-sum-exp and takes another,
heavier kernel on ``meta`` than on the device, which would make a dry run wrong by 20 % to 40 %.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer_rank.runtime.attention.cuda_scratch import CallSizes

_aten = torch.ops.aten


class Kernel(ABC):
    """One fused attention kernel; abstract here, final below.

    ``top_left`` tells how the kernel aligns a causal mask when T > S: True when query i sees keys 0..i (so that one
    call serves a segment and its descendants), False when the mask is aligned at the bottom right.
    """

    name: str
    top_left: bool
    row_alignment = 1
    """Rows to a multiple of which the kernel pads its log-sum-exp."""
    one_is_a_view = False
    """Whether the results of a batch of one are laid out so that fewer copies are made of them."""

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Return (out, lse): (B, H, T, D) in the dtype of ``q`` and (B, H, T) in the accumulation dtype."""

    @abstractmethod
    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) for softmax weights ``exp(q k^T * scale - lse)``; ``out`` and ``lse`` may be merged."""

    @abstractmethod
    def forward_scratch_bytes(self, sizes: CallSizes, dtype: torch.dtype) -> int:
        """Return the bytes a forward allocates inside, beside its results."""

    @abstractmethod
    def backward_scratch_bytes(self, sizes: CallSizes, dtype: torch.dtype) -> int:
        """Return the bytes a backward allocates inside, beside its results."""

    def forward_scratch_at_most(self, sizes: CallSizes, dtype: torch.dtype) -> int:
        """Return what no forward allocates inside that exceeds ``sizes`` in nothing.

        Most kernels need the more the larger the call; one that does not says so here.
        """
        return self.forward_scratch_bytes(sizes, dtype)

    def takes_at_once(self, sizes: CallSizes) -> bool:
        """Return whether a backward runs all its sequences in one call."""
        return True


@dataclass(frozen=True, slots=True)
class CpuFlashKernel(Kernel):
    """aten's CPU flash attention: float32, float64 and bfloat16, fewer key/value heads natively.

    On ``meta`` the per-thread scratch of the real kernel is allocated and dropped, so that a dry run sees the same
    peak. The scratch sizes follow ``aten/src/ATen/native/cpu/FlashAttentionKernel.cpp`` and were checked byte for byte
    against the profiler's allocator events (torch 2.13, float32, float64 and bfloat16, one and two threads).
    """

    threads: int
    name = "cpu-flash"
    top_left = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        if q.is_meta:
            allocate(self.forward_scratch_bytes(call_sizes(q, k), q.dtype), q)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
        if q.is_meta:
            allocate(self.backward_scratch_bytes(call_sizes(q, k), q.dtype), q)
        return grads

    def forward_scratch_bytes(self, sizes: CallSizes, dtype: torch.dtype) -> int:
        return self._scratch_bytes(sizes, dtype, forward=True)

    def backward_scratch_bytes(self, sizes: CallSizes, dtype: torch.dtype) -> int:
        return self._scratch_bytes(sizes, dtype, forward=False)

    def _scratch_bytes(self, sizes: CallSizes, dtype: torch.dtype, *, forward: bool) -> int:
        return flash_scratch_bytes(
            num_queries=sizes.queries,
            num_keys=sizes.keys,
            head_size=sizes.head_size,
            dtype=dtype,
            threads=self.threads,
            forward=forward,
        )


def call_sizes(q: Tensor, k: Tensor) -> CallSizes:
    """Return the sizes of a call on queries (B, H, T, D) and keys (B, G, S, D)."""
    return CallSizes(
        batch=q.shape[0],
        heads=q.shape[1],
        groups=k.shape[1],
        queries=q.shape[2],
        keys=k.shape[2],
        head_size=q.shape[3],
    )


def allocate(nbytes: int, like: Tensor) -> None:
    """Allocate and drop what a kernel allocates inside."""
    if nbytes:
        torch.empty(nbytes, dtype=torch.uint8, device=like.device)


def flash_scratch_bytes(
    *, num_queries: int, num_keys: int, head_size: int, dtype: torch.dtype, threads: int, forward: bool
) -> int:
    """Return the bytes aten's CPU flash kernel allocates inside one call."""
    block = 256 if num_queries >= 768 else 64 if num_queries >= 192 else 32
    rows, cols = min(block, num_queries), min(512, num_keys)
    accumulate = 8 if dtype == torch.float64 else 4
    reduced = dtype.itemsize if dtype in (torch.bfloat16, torch.float16) else 0
    if forward:
        return threads * ((rows * cols + 2 * rows + rows * head_size) * accumulate + rows * cols * reduced)
    return threads * 2 * rows * cols * (accumulate + reduced) + rows * accumulate
