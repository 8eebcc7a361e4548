"""A packed tree against the stock model run one request at a time, in float32, on one device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from trainer_rank import Layout, Request, TransformersRuntime
from trainer_rank.executor.run import run_forward
from trainer_rank.planner import pass_work
from trainer_rank.requests import IGNORED

VOCABULARY = 512


def packed_against_alone(device: torch.device) -> tuple[float, float]:
    """Return the largest difference of a log-prob, and of a parameter's gradient relative to its norm.

    The worst of an adapter and of all weights. The oracle is the library's own model with its own ``sdpa`` attention.
    """
    worst = [_compare(device, lora=lora) for lora in (True, False)]
    return max(logp for logp, _ in worst), max(grad for _, grad in worst)


def _compare(device: torch.device, *, lora: bool) -> tuple[float, float]:
    model, oracle = _model(device, lora=lora), _model(device, lora=lora)
    oracle.load_state_dict(model.state_dict())
    batch = _requests()
    torch.manual_seed(1)
    weights = [torch.randn(len(request.tokens), device=device) for request in batch]
    wanted = [_alone(oracle, request, device) for request in batch]
    torch.stack([(weight * each).sum() for weight, each in zip(weights, wanted, strict=True)]).sum().backward()
    runtime = TransformersRuntime(model)
    work = pass_work(batch, range(len(batch)), Layout.full_sharing())
    found = run_forward(runtime, work, head_chunk_rows=256, map_error=lambda error: error).logprobs
    torch.stack([(weight * each).sum() for weight, each in zip(weights, found, strict=True)]).sum().backward()
    logp = max(float((a - b).detach().abs().max()) for a, b in zip(found, wanted, strict=True))
    return logp, _worst_gradient(model.parameters(), oracle.parameters())


def _worst_gradient(found: Any, wanted: Any) -> float:
    pairs = [(a.grad, b.grad) for a, b in zip(found, wanted, strict=True) if a.requires_grad]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def _model(device: torch.device, *, lora: bool) -> Any:
    config = Qwen3Config(
        hidden_size=256,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=512,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
        # Large enough that attention is far from uniform, so that a wrong mask moves the numbers.
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    return model.to(device)


def _requests() -> list[Request]:
    """Return branches at two depths, short and long, a request that ends inside the tree, and one that shares none."""
    draw = np.random.default_rng(0)
    root, branch = draw.integers(0, VOCABULARY, 200), draw.integers(0, VOCABULARY, 130)
    ends = [draw.integers(0, VOCABULARY, length) for length in (1, 3, 17, 20, 64, 65, 300)]
    rows = [np.concatenate([root, branch, end]) for end in ends]
    rows += [np.concatenate([root, end]) for end in ends[2:5]]
    rows += [np.concatenate([root, branch]), draw.integers(0, VOCABULARY, 90)]
    return [Request.next_token(row) for row in rows]


def _alone(oracle: Any, request: Request, device: torch.device) -> Tensor:
    assert request.labels is not None
    labels = torch.from_numpy(request.labels.copy()).to(device)
    ids = torch.from_numpy(request.tokens.copy()).to(device)
    logits = oracle(input_ids=ids[None], use_cache=False).logits[0]
    picked = logits.log_softmax(-1).gather(1, labels.clamp_min(0)[:, None])[:, 0]
    return torch.where(labels == IGNORED, 0.0, picked)
