"""The start-up check: passes sound backends, refuses one that leaks or cuts, leaves gradients alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.equivalence.models import tiny_model
from trainer_rank.errors import SelfTestError
from trainer_rank.executor.self_test import self_test
from trainer_rank.runtime import transformers as adapter
from trainer_rank.runtime.attention import AttentionPlan, BoundAttention, attention_plan, tree_attention
from trainer_rank.runtime.transformers import TransformersRuntime


def runtime(dtype: torch.dtype = torch.float32) -> TransformersRuntime:
    """Return the runtime of a tiny model."""
    return TransformersRuntime(tiny_model("llama", lora=True, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_sound_backend_passes(dtype: torch.dtype) -> None:
    """In every dtype the tolerance leaves room for rounding."""
    self_test(runtime(dtype), head_chunk_rows=4)


def test_gradients_already_accumulated_are_left_as_they_are() -> None:
    """The check neither adds to a gradient nor drops it."""
    subject = runtime()
    first, *others = subject.trainable_parameters()
    first.grad = torch.full_like(first, 3.0)
    kept = first.grad
    self_test(subject, head_chunk_rows=4)
    assert first.grad is kept
    assert bool((kept == 3.0).all())
    assert all(parameter.grad is None for parameter in others)


def plain_causal(q: Tensor, k: Tensor, v: Tensor, bound: Any, scale: float) -> Tensor:
    """Attention over all earlier rows, whatever the tree: branches see their siblings."""
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def cut_at_branches(q: Tensor, k: Tensor, v: Tensor, bound: Any, scale: float) -> Tensor:
    """Attention of each segment to itself alone, as if restarting positions were boundaries."""
    plan = bound.plan
    lone = attention_plan(*_segments_as_roots(plan))
    return tree_attention(q, k, v, BoundAttention.bind(lone, bound.kernel, q.device), scale)


def _segments_as_roots(plan: AttentionPlan) -> tuple[Any, Any, Any]:
    edges = {0, plan.num_rows}
    edges.update(row for block in plan.blocks for row in (block.start, block.stop))
    for bucket in plan.buckets:
        begins = [bucket.start] if bucket.rows is None else bucket.rows[:, 0].tolist()
        edges.update(begins)
    starts = np.array(sorted(edges))
    return starts[:-1], starts[1:], starts[1:]


@pytest.mark.parametrize("attention", [plain_causal, cut_at_branches], ids=["leak", "cut"])
def test_a_backend_that_mistakes_the_tree_is_refused(monkeypatch: pytest.MonkeyPatch, attention: Any) -> None:
    """The message gives the differences and says that nothing was trained."""
    monkeypatch.setattr(adapter, "tree_attention", attention)
    with pytest.raises(SelfTestError, match=r"packed and alone disagree.*Nothing was trained"):
        self_test(runtime(), head_chunk_rows=4)
