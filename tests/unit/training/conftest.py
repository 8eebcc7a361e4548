"""A tiny random model and rollouts for it, on disk as a run finds them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random Llama of two layers with a vocabulary of 64 and a context of 128."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny") / "model"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def rollouts_file(tmp_path: Path) -> Path:
    """Return a file of three conversations of three turns each, with what cispo needs."""
    generator = random.Random(0)
    lines = []
    for group in "abc":
        tokens: list[int] = []
        for _ in range(3):
            tokens += [generator.randrange(64) for _ in range(12)]
            trained = [0] * (len(tokens) - 4) + [1] * 4
            lines.append(
                {
                    "tokens": list(tokens),
                    "trained": trained,
                    "group": group,
                    "advantage": generator.uniform(-1, 1),
                    "old_logprobs": [-4.0 if one else None for one in trained],
                }
            )
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
