"""Float64 all the way: the stock RMSNorm computes in float32 whatever its input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm


@pytest.fixture(autouse=True)
def norms_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give RMSNorm the precision of its input, for the runtime and its oracle alike."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        mean = hidden_states.pow(2).mean(-1, keepdim=True)
        result: Tensor = self.weight * (hidden_states * torch.rsqrt(mean + self.variance_epsilon))
        return result

    for cls in (LlamaRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm):
        monkeypatch.setattr(cls, "forward", forward)
