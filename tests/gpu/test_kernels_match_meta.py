"""CUDA's kernels on ``meta`` are what they are on the device: shapes, strides, dtypes, and memory inside a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.gpu.device import CUDA, META, needs_cuda, peak_requested_bytes, requested_bytes
from trainer_rank.executor.recorder import AllocationRecorder
from trainer_rank.memory import fold
from trainer_rank.runtime.attention import kernel_for

pytestmark = needs_cuda


class Shape(NamedTuple):
    """Sizes of one kernel call."""

    batch: int
    heads: int
    groups: int
    queries: int
    keys: int
    size: int
    causal: bool


SHAPES = [
    Shape(1, 32, 8, 2048, 2048, 128, True),
    Shape(1, 32, 8, 700, 3000, 128, False),
    Shape(1, 16, 16, 513, 8192, 64, False),
    Shape(1, 8, 2, 5, 8192, 128, False),
    Shape(1, 32, 8, 1, 4096, 128, False),
    Shape(40, 8, 8, 33, 33, 64, True),
    Shape(300, 8, 2, 1, 1, 128, True),
]
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


class Call:
    """Forward and backward of one kernel on one device."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self._kernel = kernel_for(CUDA, dtype)
        self._causal = shape.causal
        self._q, self._k, self._v, grad = (
            torch.zeros(shape.batch, rows, count, shape.size, dtype=dtype, device=device).transpose(1, 2)
            for rows, count in (
                (shape.queries, shape.heads),
                (shape.keys, shape.groups),
                (shape.keys, shape.groups),
                (shape.queries, shape.heads),
            )
        )
        self._grad = grad
        self._out, self._lse = self.forward()

    def forward(self) -> Sequence[Tensor]:
        """Run the forward."""
        return self._kernel.forward(self._q, self._k, self._v, causal=self._causal, scale=0.1)

    def backward(self) -> Sequence[Tensor]:
        """Run the backward on the forward's results."""
        return self._kernel.backward(
            self._grad, self._q, self._k, self._v, self._out, self._lse, causal=self._causal, scale=0.1
        )


def forms(tensors: Sequence[Tensor]) -> list[tuple[object, ...]]:
    """Return shape, dtype and strides of each tensor; the stride of a dimension of one is anybody's guess."""
    return [
        (x.shape, x.dtype, [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1])
        for x in tensors
    ]


def peak_on_meta(run: Callable[[], Sequence[Tensor]]) -> int:
    """Return the peak of new bytes as a dry run sees it."""
    recorder = AllocationRecorder(META, CUDA)
    with recorder:
        run()
    return fold(recorder.trace(1)).peak.peak_bytes


def peak_on_cuda(run: Callable[[], Sequence[Tensor]]) -> int:
    """Return the peak of new bytes the device's allocator is asked for."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = requested_bytes()
    run()
    torch.cuda.synchronize()
    return peak_requested_bytes() - before


@each_dtype
@each_shape
def test_results_have_the_same_form(shape: Shape, dtype: torch.dtype) -> None:
    """Shapes, dtypes and strides of forward and backward."""
    real, dry = Call(shape, dtype, CUDA), Call(shape, dtype, META)
    assert forms(dry.forward()) == forms(real.forward())
    assert forms(dry.backward()) == forms(real.backward())


@each_dtype
@each_shape
def test_a_forward_needs_the_same_memory(shape: Shape, dtype: torch.dtype) -> None:
    """Partial outputs of split keys included."""
    real, dry = Call(shape, dtype, CUDA), Call(shape, dtype, META)
    assert peak_on_meta(dry.forward) == pytest.approx(peak_on_cuda(real.forward), rel=0.01, abs=4096)


@each_dtype
@each_shape
def test_a_backward_needs_the_same_memory(shape: Shape, dtype: torch.dtype) -> None:
    """Padded float32 gradients and gradients per query head included."""
    real, dry = Call(shape, dtype, CUDA), Call(shape, dtype, META)
    assert peak_on_meta(dry.backward) == pytest.approx(peak_on_cuda(real.backward), rel=0.01, abs=4096)
