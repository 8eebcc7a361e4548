"""The CPU's fused attention kernel."""

from __future__ import annotations

import pytest
import torch

from trainer_rank.runtime.attention import CpuFlashKernel, kernel_for


def test_the_causal_mask_is_aligned_at_the_top_left() -> None:
    """With more queries than keys, query i sees keys 0..i and later queries see all: one call serves a whole block."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, rows, 4, dtype=torch.float64) for rows in (5, 3, 3))
    out, lse = CpuFlashKernel(1).forward(q, k, v, causal=True, scale=0.5)
    scores = (q @ k.transpose(-1, -2) * 0.5).masked_fill(~torch.ones(5, 3, dtype=torch.bool).tril(), float("-inf"))
    torch.testing.assert_close(out, scores.softmax(-1) @ v)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_log_sum_exp_is_kept_in_the_accumulation_dtype(dtype: torch.dtype) -> None:
    """float64 accumulates in float64, everything else in float32."""
    q = torch.randn(1, 2, 5, 4).to(dtype)
    out, lse = CpuFlashKernel(1).forward(q, q, q, causal=True, scale=0.5)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_a_dry_run_uses_the_kernel_of_the_cpu() -> None:
    """``meta`` stands for the CPU here."""
    assert kernel_for(torch.device("meta"), torch.float32) == kernel_for(torch.device("cpu"), torch.float32)
