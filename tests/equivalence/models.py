"""Tiny models with random weights, and the stock library model with the same weights as their oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from trainer_rank.executor.run import run_forward
from trainer_rank.planner import pass_work
from trainer_rank.prefix import Layout
from trainer_rank.requests import IGNORED, Request
from trainer_rank.runtime.transformers import TransformersRuntime

VOCABULARY = 40
FAMILIES = ("llama", "qwen2", "qwen3")


def tiny_model(family: str, *, lora: bool, dtype: torch.dtype = torch.float64) -> Any:
    """Return two layers with grouped-query heads; Qwen2 and Qwen3 tie their embeddings, Llama does not."""
    common = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 40,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        # Large enough that attention is far from uniform: a wrong mask then moves the numbers.
        "initializer_range": 0.2,
    }
    config = {
        "llama": lambda: LlamaConfig(tie_word_embeddings=False, **common),
        "qwen2": lambda: Qwen2Config(tie_word_embeddings=True, **common),
        "qwen3": lambda: Qwen3Config(tie_word_embeddings=True, head_dim=12, **common),
    }[family]()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    if lora:
        targets = ["q_proj", "k_proj", "v_proj", "down_proj"]
        model = get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@dataclass(frozen=True)
class Numbers:
    """Log-probs by request and the gradient of each trained parameter."""

    logprobs: list[Tensor]
    grads: list[Tensor]


@dataclass(frozen=True)
class Pair:
    """A runtime and a stock model with the same weights."""

    runtime: TransformersRuntime
    oracle: Any

    @classmethod
    def make(cls, family: str, *, lora: bool, recompute: Any = "none") -> Pair:
        """Return the runtime of a tiny model and its oracle."""
        model, oracle = tiny_model(family, lora=lora), tiny_model(family, lora=lora)
        oracle.load_state_dict(model.state_dict())
        return cls(TransformersRuntime(model, recompute=recompute), oracle)

    def alone(self, requests: Sequence[Request], weights: Sequence[Tensor]) -> Numbers:
        """Return the oracle's numbers for the loss ``sum(weight * logprob)``, each request run by itself."""
        parameters = [parameter for parameter in self.oracle.parameters() if parameter.requires_grad]
        logprobs, grads = [], [torch.zeros_like(parameter) for parameter in parameters]
        for request, weight in zip(requests, weights, strict=True):
            assert request.labels is not None
            labels = torch.from_numpy(request.labels.copy())
            logits = self.oracle(input_ids=torch.from_numpy(request.tokens.copy())[None], use_cache=False).logits[0]
            picked = logits.log_softmax(-1).gather(1, labels.clamp_min(0).reshape(len(labels), -1)).view(labels.shape)
            found = torch.where(labels == IGNORED, 0.0, picked)
            logprobs.append(found.detach())
            for total, grad in zip(grads, torch.autograd.grad((found * weight).sum(), parameters), strict=True):
                total += grad
        return Numbers(logprobs, grads)

    def packed(
        self, requests: Sequence[Request], weights: Sequence[Tensor], *passes: tuple[Sequence[int], Layout]
    ) -> Numbers:
        """Return the runtime's numbers for passes of (request indices, layout), gradients accumulated."""
        self.clear()
        found: dict[int, Tensor] = {}
        for indices, layout in passes:
            work = pass_work([requests[index] for index in indices], indices, layout)
            result = run_forward(self.runtime, work, head_chunk_rows=5, map_error=lambda error: error)
            found.update(zip(indices, result.logprobs, strict=True))
            torch.stack([(weights[index] * found[index]).sum() for index in indices]).sum().backward()
        return Numbers([found[index].detach() for index in range(len(requests))], self.grads())

    def clear(self) -> None:
        """Drop accumulated gradients."""
        for parameter in self.runtime.trainable_parameters():
            parameter.grad = None

    def grads(self) -> list[Tensor]:
        """Return the accumulated gradients, all of which must be there."""
        found = [parameter.grad for parameter in self.runtime.trainable_parameters()]
        assert all(grad is not None for grad in found)
        return [grad for grad in found if grad is not None]


def assert_same(found: Numbers, wanted: Numbers, *, tolerance: float = 1e-10) -> None:
    """Assert equal log-probs and gradients, each parameter's relative to its norm, or to the whole's if it is zero."""
    assert len(found.logprobs) == len(wanted.logprobs) > 0
    assert len(found.grads) == len(wanted.grads) > 0
    for a, b in zip(found.logprobs, wanted.logprobs, strict=True):
        assert a.shape == b.shape
        assert float((a - b).abs().max()) <= tolerance
    whole = float(torch.stack([grad.norm() for grad in wanted.grads]).norm())
    for a, b in zip(found.grads, wanted.grads, strict=True):
        norm = float(b.norm())
        assert float((a - b).norm()) <= tolerance * (norm if norm > 1e-13 * whole else whole)
