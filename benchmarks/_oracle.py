"""The exactness benchmark's models under test and their oracle: the library's stock model, each request alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from _shapes import VOCABULARY
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from trainer_rank import Request, TransformersRuntime
from trainer_rank.requests import IGNORED


@dataclass(frozen=True, slots=True)
class Way:
    """A way to train: model family, what is trained, what is recomputed."""

    family: str
    trained: str
    recompute: str

    def __str__(self) -> str:
        return f"{self.family:6} {self.trained:11} recompute {self.recompute}"


FAMILIES = ("llama", "qwen2", "qwen3")
TRAINED = ("adapter", "all weights")
RECOMPUTE = ("full", "none")
WAYS = [Way(*way) for way in itertools.product(FAMILIES, TRAINED, RECOMPUTE)]


@dataclass(slots=True)
class Subject:
    """A model under test and its oracle, with the same weights."""

    model: Any
    oracle: Any
    _runtime: TransformersRuntime | None = field(default=None)

    def runtime(self, recompute: str) -> TransformersRuntime:
        """Return the model under test with ``recompute``."""
        if self._runtime is None or self._runtime.recompute != recompute:
            self._runtime = TransformersRuntime(self.model, recompute=recompute)
        return self._runtime

    def parameter_names(self) -> list[str]:
        """Return the names of the trained parameters."""
        return [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]


@dataclass(frozen=True, slots=True)
class Reference:
    """What the oracle gives: log-probs and gradients by request, and the scale of each parameter's gradient."""

    logprobs: list[Tensor]
    grads: list[list[Tensor]]
    scale: Tensor


def make_subject(family: str, trained: str, dtype: torch.dtype) -> Subject:
    """Return a model with random weights and a stock copy of it."""
    torch.manual_seed(0)
    model, oracle = _tiny_model(family, trained, dtype), _tiny_model(family, trained, dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif "lora" in name:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    oracle.load_state_dict(model.state_dict())
    return Subject(model, oracle)


def _tiny_model(family: str, trained: str, dtype: torch.dtype) -> Any:
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=dtype, attn_implementation="sdpa")
    if trained == "adapter":
        targets = ["q_proj", "k_proj", "v_proj", "down_proj"]
        return get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    return model


def tiny_config(family: str) -> Any:
    """Return two or three layers with grouped-query heads; Qwen2 has biases, Qwen3 a head size of its own."""
    common = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        # Large enough that attention is far from uniform, so that a wrong mask moves the numbers.
        "initializer_range": 0.15,
    }
    if family == "llama":
        return LlamaConfig(num_hidden_layers=2, tie_word_embeddings=False, **common)
    if family == "qwen2":
        return Qwen2Config(num_hidden_layers=2, tie_word_embeddings=True, **common)
    return Qwen3Config(num_hidden_layers=3, tie_word_embeddings=True, head_dim=24, **common)


@contextmanager
def norms_in_float64() -> Iterator[None]:
    """Give RMSNorm, which computes in float32 whatever its input, the precision of its input."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        mean = hidden_states.pow(2).mean(-1, keepdim=True)
        result: Tensor = self.weight * (hidden_states * torch.rsqrt(mean + self.variance_epsilon))
        return result

    stock = {cls: cls.forward for cls in (LlamaRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm)}
    for cls in stock:
        cls.forward = forward
    try:
        yield
    finally:
        for cls, method in stock.items():
            cls.forward = method


def alone(oracle: Any, request: Request) -> Tensor:
    """Return the log-probs of one request from the stock model in float64, of its labels' shape, 0 where ignored."""
    assert request.labels is not None
    labels = torch.from_numpy(request.labels.copy())
    logits = oracle(input_ids=torch.from_numpy(request.tokens.copy())[None], use_cache=False).logits[0]
    # Over a large vocabulary a float32 log-softmax is itself off by 3e-5; the oracle's must not be.
    picked = logits.double().log_softmax(-1).gather(1, labels.clamp_min(0).reshape(len(labels), -1)).view(labels.shape)
    return torch.where(labels == IGNORED, 0.0, picked)


def reference(subject: Subject, batch: Sequence[Request], weights: Sequence[Tensor]) -> Reference:
    """Return the oracle's numbers for the loss ``sum(weight * logprob)``."""
    parameters = [parameter for parameter in subject.oracle.parameters() if parameter.requires_grad]
    logprobs, grads = [], []
    for request, weight in zip(batch, weights, strict=True):
        found = alone(subject.oracle, request)
        logprobs.append(found.detach())
        grads.append(list(torch.autograd.grad((found * weight).sum(), parameters)))
    return Reference(logprobs, grads, _scale([torch.stack(each).sum(0) for each in zip(*grads, strict=True)]))


def _scale(total: Sequence[Tensor]) -> Tensor:
    """Return the norm of each parameter's gradient; the whole gradient's where it is zero but for rounding.

    A request of one token, for example, attends to itself alone: its queries and keys have no gradient.
    """
    norms = torch.stack([grad.double().norm() for grad in total])
    rounding = 64 * torch.finfo(total[0].dtype).eps
    return torch.where(norms <= rounding * norms.norm(), norms.norm(), norms)
