"""Passes for the cold-price benchmark: tiny models of every kind, and trees of random shape to run through them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from trainer_rank import Request, TransformersRuntime

Tokens = NDArray[np.int64]

FAMILIES = ("llama", "qwen2", "qwen3")
EVERY_PROJECTION = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, slots=True)
class Case:
    """One pass to predict and to measure."""

    family: str
    trained: str
    recompute: str
    dtype: str
    layers: int
    threads: int
    shape: str
    seed: int

    def __str__(self) -> str:
        return (
            f"{self.family:6} {self.trained:7} recompute {self.recompute:4} {self.dtype:8} {self.layers} layers "
            f"{self.threads} threads {self.shape:8}"
        )


def cases() -> Iterator[Case]:
    """Yield each way to train twice, over changing shapes, depths, dtypes and thread counts."""
    dtypes = itertools.cycle(["float32", "float32", "bfloat16", "float32", "float64"])
    shapes = itertools.cycle(["flat", "random", "labels", "chain", "tiny", "ragged", "apart", "wide", "single"])
    depths = itertools.cycle([5, 2, 7, 3, 4])
    threads = itertools.cycle([1, 1, 2])
    ways = list(itertools.product(FAMILIES, ("adapter", "all"), ("full", "none")))
    for seed, way in enumerate(ways * 4):
        yield Case(*way, next(dtypes), next(depths), next(threads), next(shapes), seed)


def runtime(case: Case) -> TransformersRuntime:
    """Return a model of the case's kind with random weights."""
    random = np.random.default_rng(case.seed)
    common: dict[str, Any] = {
        "hidden_size": int(random.choice([64, 96, 128])),
        "num_hidden_layers": case.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": int(random.choice([1, 2, 8])),
        "intermediate_size": int(random.choice([160, 256, 352])),
        "vocab_size": int(random.choice([300, 1000, 5000])),
        "max_position_embeddings": 8192,
    }
    if case.family == "llama":
        config: Any = LlamaConfig(tie_word_embeddings=False, **common)
    elif case.family == "qwen2":
        config = Qwen2Config(tie_word_embeddings=True, **common)
    else:
        config = Qwen3Config(tie_word_embeddings=True, head_dim=24, **common)
    torch.manual_seed(case.seed)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, case.dtype))
    if case.trained == "adapter":
        targets = EVERY_PROJECTION if case.seed % 2 else ["q_proj", "v_proj", "down_proj"]
        model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    return TransformersRuntime(model, recompute=case.recompute)  # type: ignore[arg-type]


def requests(shape: str, seed: int, vocabulary: int) -> list[Request]:
    """Return requests whose tree has the named shape, loss on what is not shared."""
    random = np.random.default_rng(1000 + seed)

    def run(length: int) -> Tokens:
        return random.integers(0, vocabulary, length)

    def branch(prompt: Tokens, length: int) -> Request:
        tokens = np.concatenate([prompt, run(length)])
        return Request.next_token(tokens, trained=np.arange(tokens.size) >= prompt.size)

    if shape == "single":
        return [Request.next_token(run(int(random.integers(300, 900))))]
    if shape == "tiny":
        return [Request.next_token(run(length)) for length in (7, 3)]
    if shape == "labels":
        tokens = run(300)
        return [
            Request(tokens=tokens[:length], labels=random.integers(0, vocabulary, (length, 5))) for length in (120, 300)
        ]
    if shape == "apart":
        return [Request.next_token(run(int(random.integers(40, 300)))) for _ in range(4)]
    prompt = run(int(random.integers(150, 500)))
    if shape == "flat":
        return [branch(prompt, 64) for _ in range(6)]
    if shape == "ragged":
        return [branch(prompt, int(length)) for length in random.integers(1, 200, 8)]
    if shape == "wide":
        return [branch(prompt, int(length)) for length in random.integers(1, 17, 40)]
    if shape == "chain":
        found = []
        for length in random.integers(20, 150, 5):
            found.append(branch(prompt, int(length)))
            prompt = found[-1].tokens
        return found
    # A random tree: each request leaves an earlier one somewhere and goes its own way.
    found = [branch(prompt, 80)]
    for length in random.integers(1, 120, 9):
        origin = found[int(random.integers(len(found)))].tokens
        found.append(branch(origin[: int(random.integers(1, origin.size))], int(length)))
    return found
