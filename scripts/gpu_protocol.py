"""Exactness and predicted against observed peak memory on one CUDA device.

Memory: 8 layers of Qwen3-8B's geometry, random weights, bfloat16, a frozen base with a LoRA adapter, full recompute;
passes of exactly 16,384 packed rows whose requests end in 512 tokens of their own, at sharing ratios 1, 2, 4 and 8. Two
calls are not counted (cold kernels and workspaces); then three repeats of all ratios, requests and ratios shuffled.
The price says which bytes are asked for; the allocator rounds blocks up, so what it counts as allocated is a little
more, and what it reserves from the device more again.

``--quick`` runs a small model on whatever device there is, for a smoke test; ``--output DIR`` as in every benchmark.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from _harness import finish, quick, target
from gpu_exactness import packed_against_alone
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3Config

from trainer_rank import Layout, Request, TrainerRank, TransformersRuntime
from trainer_rank.units import MIB

QUICK = quick()
SUFFIX = 8 if QUICK else 512
UNCOUNTED, REPEATS = (1, 1) if QUICK else (2, 3)

# Sharing ratio -> trees of (prefix, suffixes), both in suffix lengths: 32 in all, so 16,384 rows, and the ratio exact.
TREES = {
    1: [(0, 1)] * 32,
    2: [(22, 2), (5, 3)],
    4: [(18, 6), (6, 2)],
    8: [(16, 15), (0, 1)],
}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, slots=True)
class Call:
    """One measured call, bytes above what was there before it."""

    required_bytes: int
    allocated_bytes: int
    requested_bytes: int
    reserved_bytes: int
    packed_rows: int
    sharing_ratio: float
    seconds: float


def make_rank(device: torch.device) -> TrainerRank:
    """Return a rank for the measured model."""
    config = Qwen3Config(
        hidden_size=256 if QUICK else 4096,
        num_hidden_layers=4 if QUICK else 8,
        num_attention_heads=4 if QUICK else 32,
        num_key_value_heads=2 if QUICK else 8,
        head_dim=64 if QUICK else 128,
        intermediate_size=512 if QUICK else 12288,
        vocab_size=1024 if QUICK else 151936,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with device:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model = get_peft_model(model, LoraConfig(r=8, target_modules=LINEAR))
    return TrainerRank(TransformersRuntime(model, recompute="full"), layout=Layout.full_sharing())


def requests(ratio: int, vocabulary: int, seed: int) -> list[Request]:
    """Return the requests of a ratio, shuffled, every token but the first a label."""
    draw = np.random.default_rng(seed)
    rows = []
    # Prefixes and suffixes begin with tokens of their own, so that nothing is shared by accident.
    first = iter(draw.permutation(vocabulary).tolist())

    def fresh(units: int) -> np.ndarray:
        tokens = draw.integers(0, vocabulary, units * SUFFIX)
        tokens[:1] = next(first)
        return tokens

    for prefix, suffixes in TREES[ratio]:
        head = fresh(prefix)
        rows += [np.concatenate([head, fresh(1)]) for _ in range(suffixes)]
    draw.shuffle(rows)
    return [Request.next_token(row) for row in rows]


def measure(rank: TrainerRank, batch: list[Request]) -> Call:
    """Run one batch forward and backward and return what it took."""
    before, started = rank.meter.prepare(), time.perf_counter()
    cuda = rank.runtime.device.type == "cuda"
    requested = torch.cuda.memory_stats()["requested_bytes.all.current"] if cuda else before.allocated_bytes
    stats = []
    for micro_batch in rank.forward_micro_batches(batch):
        found = [result.logprobs.sum() for result in micro_batch.results if result.logprobs is not None]
        (torch.stack(found).sum() / micro_batch.num_trained).backward()
        stats.append(micro_batch.stats)
        del micro_batch, found
    after = rank.meter.read()
    seconds = time.perf_counter() - started
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] if cuda else after.peak_allocated_bytes
    rank.zero_grad()
    (only,) = stats
    return Call(
        required_bytes=only.required_bytes,
        allocated_bytes=after.peak_allocated_bytes - before.allocated_bytes,
        requested_bytes=peak - requested,
        reserved_bytes=after.peak_reserved_bytes - before.reserved_bytes,
        packed_rows=only.packed_rows,
        sharing_ratio=only.sharing_ratio,
        seconds=seconds,
    )


def run(rank: TrainerRank) -> dict[int, list[Call]]:
    """Return the counted calls of each ratio."""
    vocabulary = rank.runtime.facts.vocabulary_size
    for seed in range(UNCOUNTED):
        measure(rank, requests(1, vocabulary, seed))
    calls: dict[int, list[Call]] = {ratio: [] for ratio in TREES}
    order = random.Random(0)
    for repeat in range(REPEATS):
        for ratio in order.sample(list(TREES), len(TREES)):
            calls[ratio].append(measure(rank, requests(ratio, vocabulary, 100 * repeat + ratio)))
    return calls


def report(calls: dict[int, list[Call]]) -> dict[str, float]:
    """Print a table, the largest of the repeats per ratio, and return the figures."""
    figures: dict[str, float] = {}
    columns = (
        "required_mib",
        "allocated_mib",
        "requested_mib",
        "reserved_mib",
        "bytes_per_row",
        "predicted",
        "seconds",
    )
    print("ratio " + " ".join(f"{name:>13}" for name in columns))
    for ratio, found in sorted(calls.items()):
        assert {call.packed_rows for call in found} == {32 * SUFFIX}, "the passes have the protocol's rows"
        assert all(call.sharing_ratio == ratio for call in found), "and its sharing ratios"
        peak = max(call.allocated_bytes for call in found)
        required = min(call.required_bytes for call in found)
        row = {
            "required_mib": required / MIB,
            "allocated_mib": peak / MIB,
            "requested_mib": max(call.requested_bytes for call in found) / MIB,
            "reserved_mib": max(call.reserved_bytes for call in found) / MIB,
            "bytes_per_row": peak / (32 * SUFFIX),
            "predicted": required / peak,
            "seconds": statistics.median(call.seconds for call in found),
        }
        print(f"{ratio:5} " + " ".join(f"{row[name]:13.3f}" for name in columns))
        figures |= {f"ratio_{ratio}_{name}": value for name, value in row.items()}
    per_row = [figures[f"ratio_{ratio}_bytes_per_row"] for ratio in calls]
    predicted = [figures[f"ratio_{ratio}_predicted"] for ratio in calls]
    figures |= {
        "flatness": max(per_row) / min(per_row),
        "least_predicted_over_observed": min(predicted),
        "most_predicted_over_observed": max(predicted),
    }
    return figures


def main() -> None:
    """Print the table and the JSON object."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu" and not QUICK:
        raise SystemExit("gpu_protocol: there is no CUDA device; --quick runs a small model on the CPU")
    logp, grad = packed_against_alone(device)
    print(f"float32, packed against alone: log-probs within {logp:.1e}, gradients within {grad:.1e} of their norm")
    figures = {"float32_logp": logp, "float32_grad": grad, **report(run(make_rank(device)))}
    targets = [
        target("float32_logp", "le", 1e-4),
        target("float32_grad", "le", 1e-4),
        target("flatness", "le", 1.02),
        target("least_predicted_over_observed", "ge", 0.98),
        target("most_predicted_over_observed", "le", 1.05),
    ]
    finish("gpu_check", figures, targets)


if __name__ == "__main__":
    main()
