"""Small real things for tests: models with random weights, requests, and meters that bend one answer of a real one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from trainer_rank.memory import Recompute
from trainer_rank.meters import Meter, Reading
from trainer_rank.meters.counting_lib import load
from trainer_rank.prefix import PackedBatch
from trainer_rank.requests import Request
from trainer_rank.runtime.transformers import TransformersRuntime
from trainer_rank.session import MicroBatch, Result, TrainerRank

Tokens = NDArray[np.int64]

VOCABULARY = 64
CONTEXT = 4096


class CountingRuntime(TransformersRuntime):
    """Counts its own forwards; a twin for dry runs counts its own."""

    forwards = 0

    def forward(self, batch: PackedBatch, *, recomputed: int | None = None) -> Tensor:
        self.forwards += 1
        return super().forward(batch, recomputed=recomputed)


def tiny_runtime(
    *,
    lora: bool = True,
    dtype: torch.dtype = torch.float64,
    layers: int = 1,
    hidden: int = 32,
    vocabulary: int = VOCABULARY,
    recompute: Recompute = "none",
) -> CountingRuntime:
    """Return a Llama with random weights, the same for the same arguments."""
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=2 * hidden,
        vocab_size=vocabulary,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        # Large enough that attention is far from uniform: a mixed-up request then moves the numbers.
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    return CountingRuntime(model, recompute=recompute)


def config_folder(folder: Path, **fields: Any) -> str:
    """Write the configuration of a small Llama into ``folder``, without weights, and return its path as text."""
    defaults = {
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 128, "vocab_size": 600, "tie_word_embeddings": False,
    }  # fmt: skip
    LlamaConfig(**{**defaults, **fields}).save_pretrained(folder)
    return str(folder)


def tokens(seed: int, length: int, vocabulary: int = VOCABULARY) -> Tokens:
    """Return random token ids, the same for the same arguments."""
    return np.random.default_rng(seed).integers(0, vocabulary, length)


def completion(prompt: Sequence[int] | Tokens, tail: Sequence[int] | Tokens, **fields: Any) -> Request:
    """Return a request that scores the tail only."""
    row = np.concatenate([np.asarray(prompt, dtype=np.int64), np.asarray(tail, dtype=np.int64)])
    return Request.next_token(row, trained=np.arange(row.size) >= len(prompt), **fields)


def completions(lengths: Sequence[int], *, prompt: int = 9, seed: int = 0) -> list[Request]:
    """Return completions of one random prompt with the given lengths."""
    start = tokens(seed, prompt)
    return [completion(start, tokens(seed + 1 + number, length)) for number, length in enumerate(lengths)]


def negative_sum(micro_batch: MicroBatch) -> Tensor:
    """Return the normalised negative log-likelihood of a micro-batch."""
    parts = [
        coefficient * -result.logprobs.sum()
        for coefficient, result in zip(micro_batch.coefficients, micro_batch.results, strict=True)
        if result.logprobs is not None
    ]
    return torch.stack(parts).sum()


def logprobs(result: Result) -> Tensor:
    """Return the log-probs of an active request, without graph."""
    assert result.logprobs is not None
    return result.logprobs.detach()


def gradients(rank: TrainerRank) -> list[Tensor]:
    """Return copies of the accumulated gradients, all of which must be there."""
    found = [parameter.grad for parameter in rank.runtime.trainable_parameters()]
    assert all(grad is not None for grad in found)
    return [grad.detach().clone() for grad in found if grad is not None]


def run(rank: TrainerRank, nest: Any, **options: Any) -> tuple[float, list[Tensor], int]:
    """Return (loss, gradients, micro-batches) of one accumulated step from cleared gradients; gradients are kept."""
    rank.zero_grad()
    loss, count = 0.0, 0
    for micro_batch in rank.forward_micro_batches(nest, **options):
        part = negative_sum(micro_batch)
        part.backward()
        loss, count = loss + float(part.detach()), count + 1
    return loss, gradients(rank), count


def distance(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Return the largest relative difference of two lists of gradients, tensor by tensor."""
    assert len(found) == len(wanted) > 0
    return max(
        float((a - b).norm() / b.norm()) if b.any() else float(a.abs().max())
        for a, b in zip(found, wanted, strict=True)
    )


class BentMeter(Meter):
    """A real meter whose readings for admission pass through ``bend``; cap, counters and errors stay the real ones.

    ``cap_bytes`` replaces the real allocator's cap after each ``prepare``, in live bytes.
    """

    def __init__(
        self,
        inner: Meter,
        bend: Callable[[Reading], Reading],
        cap_bytes: Callable[[], int] | None = None,
    ) -> None:
        self.inner = inner
        self.bend = bend
        self.cap_bytes = cap_bytes

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def device(self) -> str:
        return self.inner.device

    def read(self) -> Reading:
        return self.inner.read()

    def prepare(self, needed_bytes: int | None = None) -> Reading:
        reading = self.bend(self.inner.prepare(needed_bytes))
        if self.cap_bytes is not None:
            load().set_cap(self.cap_bytes())
        return reading

    def reset_peak(self) -> None:
        self.inner.reset_peak()

    def release_cached(self) -> None:
        self.inner.release_cached()

    def close(self) -> None:
        self.inner.close()


def offering(inner: Meter, available_bytes: int) -> BentMeter:
    """Return a meter that offers ``available_bytes`` less what has become live since now, as a small device would.

    The real allocator's cap follows, so that a pass that takes more runs out of memory for real.
    """
    # What earlier ranks left in cycles would count as room once it is collected.
    gc.collect()
    floor = inner.read().allocated_bytes

    def bend(reading: Reading) -> Reading:
        left = max(0, available_bytes - (reading.allocated_bytes - floor))
        return replace(reading, available_bytes=min(left, reading.available_bytes))

    return BentMeter(inner, bend, cap_bytes=lambda: floor + available_bytes)
