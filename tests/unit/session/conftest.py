"""A real CPU meter for the whole module, and float64 all the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.builders import tiny_runtime
from trainer_rank.meters import Meter, open_meter
from trainer_rank.session import TrainerRank

NewRank = Callable[..., TrainerRank]


@pytest.fixture(autouse=True)
def norms_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give RMSNorm, which computes in float32 whatever its input, the precision of its input."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        mean = hidden_states.pow(2).mean(-1, keepdim=True)
        result: Tensor = self.weight * (hidden_states * torch.rsqrt(mean + self.variance_epsilon))
        return result

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)


@pytest.fixture(scope="module")
def meter() -> Iterator[Meter]:
    """The CPU meter that a rank would open for itself, without a stated budget."""
    with open_meter("cpu") as opened:
        yield opened


@pytest.fixture
def new_rank(meter: Meter) -> NewRank:
    """Makes ranks over fresh models of the same weights, on the shared meter unless another is given."""

    def make(*, model: dict[str, Any] | None = None, **options: Any) -> TrainerRank:
        return TrainerRank(tiny_runtime(**(model or {})), verify_backend=False, **{"meter": meter, **options})

    return make


@pytest.fixture(scope="module")
def shared_rank(meter: Meter) -> TrainerRank:
    """One rank for tests that leave nothing behind but prices, which are kept by shape."""
    return TrainerRank(tiny_runtime(), verify_backend=False, meter=meter)


@pytest.fixture
def rank(shared_rank: TrainerRank) -> TrainerRank:
    """The shared rank with its gradients cleared."""
    shared_rank.zero_grad()
    return shared_rank
