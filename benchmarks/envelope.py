"""Envelopes against whole-pass traces, and what they cost to make, to load and to price with.

Per model kind and option set one envelope is made from its own sample passes and then held against 300 random passes
that had no part in it, each traced whole at the model's real depth. Rival: that trace. Figures:

* ``worst_below``, ``worst_above``: largest share of the traced peak by which an envelope falls short or exceeds.
* ``uncovered``: share of passes with a kind of call that no sample pass makes; they are run dry instead.
* ``build_seconds``: an 8B geometry of 36 layers, cold, one core, wall clock. ``load_ms``: the same from disk.
* ``price_10000_ms``: 10,000 candidates of that geometry at once. ``trace_over_price``: rival's time over ours.
"""

from __future__ import annotations

from _harness import finish, median_seconds, pin_threads, quick, target

pin_threads(1)

import tempfile  # noqa: E402
import time  # noqa: E402
import warnings  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config  # noqa: E402

from trainer_rank import Request, TransformersRuntime  # noqa: E402
from trainer_rank.executor.dry_run import DryRunPricer  # noqa: E402
from trainer_rank.executor.envelope_pricer import EnvelopePricer, make_envelope  # noqa: E402
from trainer_rank.executor.envelope_store import EnvelopeStore  # noqa: E402
from trainer_rank.memory import PassFeatures, Recompute, fold  # noqa: E402
from trainer_rank.planner import PassWork, pass_work  # noqa: E402

EVERY_PROJECTION = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PASSES = 3 if quick() else 300
CHUNK_ROWS = 64
VOCABULARY = 700
CONFIGS: dict[str, Any] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


@dataclass(frozen=True, slots=True)
class Kind:
    """A model kind and an option set."""

    family: str
    adapter: bool
    recompute: Recompute
    dtype: torch.dtype
    device: str = "cpu"
    no_grad: bool = False

    def __str__(self) -> str:
        trained = "no gradients" if self.no_grad else "adapter" if self.adapter else "all weights"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.family} {trained}, recompute {self.recompute}, {dtype}, {self.device}"


KINDS = (
    Kind("llama", True, "full", torch.float32),
    Kind("llama", True, "none", torch.float32),
    Kind("llama", True, "full", torch.float32, no_grad=True),
    Kind("qwen2", False, "full", torch.float32),
    Kind("qwen2", False, "none", torch.bfloat16),
    Kind("qwen3", True, "none", torch.bfloat16),
    Kind("qwen3", True, "full", torch.bfloat16, "cuda"),
    Kind("qwen3", False, "none", torch.bfloat16, "cuda"),
)


def small(kind: Kind) -> TransformersRuntime:
    """Return a four-layer model of a kind on ``meta``: one more than is traced to make its envelope."""
    config = CONFIGS[kind.family](
        hidden_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=208, vocab_size=VOCABULARY, tie_word_embeddings=kind.family != "llama",
    )  # fmt: skip
    return on_meta(config, kind, ["q_proj", "v_proj", "gate_proj", "down_proj"])


def eight_billion() -> TransformersRuntime:
    """Return Qwen3-8B's geometry with an adapter on every projection, for CUDA."""
    config = Qwen3Config(
        hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        intermediate_size=12288, vocab_size=151936, tie_word_embeddings=False,
    )  # fmt: skip
    return on_meta(config, Kind("qwen3", True, "full", torch.bfloat16, "cuda"), EVERY_PROJECTION)


def on_meta(config: Any, kind: Kind, projections: list[str]) -> TransformersRuntime:
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=kind.dtype)
        if kind.adapter:
            model = get_peft_model(model, LoraConfig(r=16, target_modules=projections))
    return TransformersRuntime(model, recompute=kind.recompute, stands_for=torch.device(kind.device))


def random_pass(draw: np.random.Generator, *, no_grad: bool = False) -> PassWork:
    """Return a pass of up to 14 requests over up to three prompts, with branches, chains, repeats and wide labels."""
    prompts = [draw.integers(0, VOCABULARY, int(draw.integers(1, 300))) for _ in range(draw.integers(1, 4))]
    requests = []
    for _ in range(draw.integers(1, 15)):
        prompt = prompts[draw.integers(len(prompts))]
        kept = int(draw.integers(1, prompt.size + 1)) if draw.random() < 0.4 else prompt.size
        tail = draw.integers(0, VOCABULARY, int(draw.choice([1, 6, 25, 90, 400]) * draw.random()) + 1)
        row = np.concatenate([prompt[:kept], tail])
        shape = (row.size, int(draw.integers(2, 4))) if draw.random() < 0.2 else (row.size,)
        labels = np.where(draw.random(shape) < draw.random(), 1, -100)
        labels.flat[0] = 1
        requests.append(Request(tokens=row, labels=labels, no_grad=no_grad))
    return pass_work(requests, range(len(requests)))


def compare(kind: Kind, seed: int) -> tuple[float, float, int]:
    """Return the worst share below, the worst share above and the uncovered passes of a kind."""
    model = small(kind)
    envelope = make_envelope(model, no_grad=kind.no_grad)
    pricer = EnvelopePricer(model, head_chunk_rows=CHUNK_ROWS, caller_bytes_per_token=0)
    dry = DryRunPricer(model, head_chunk_rows=CHUNK_ROWS, caller_bytes_per_token=0)
    draw = np.random.default_rng(seed)
    errors, uncovered = [], 0
    for _ in range(PASSES):
        work = random_pass(draw, no_grad=kind.no_grad)
        features = pricer.features(work)
        if not envelope.covers(features):
            uncovered += 1
            continue
        traced = fold(dry.trace(work, model.facts.num_layers)).peak.peak_bytes
        errors.append(envelope.price(features).required_bytes / traced - 1)
    print(f"{kind!s:58} {min(errors):+.6f} {max(errors):+.6f}  {len(envelope.pieces)} pieces, {uncovered} uncovered")
    return max(0.0, -min(errors)), max(0.0, max(errors)), uncovered


def time_eight_billion() -> dict[str, float]:
    model = eight_billion() if not quick() else small(KINDS[0])
    with tempfile.TemporaryDirectory() as folder:
        store = EnvelopeStore(Path(folder))
        pricer = EnvelopePricer(model, head_chunk_rows=512, caller_bytes_per_token=256, store=store)
        started = time.perf_counter()
        envelope = pricer.envelope()
        build_seconds = time.perf_counter() - started
        assert envelope is not None, "the envelope failed its check"
        facts = pricer.facts()
        load_seconds = median_seconds(lambda: store.load(facts), 5)
    draw = np.random.default_rng(3)
    works = [random_pass(draw) for _ in range(10 if quick() else 500)]
    features = [one for one in map(pricer.features, works) if envelope.covers(one)]
    candidates: list[PassFeatures] = (features * 10_000)[:10_000]
    price_seconds = median_seconds(lambda: envelope.required_bytes(candidates), 5)
    dry = DryRunPricer(model, head_chunk_rows=512, caller_bytes_per_token=256)
    started = time.process_time()
    for work in works[:3]:
        dry.price(work)
    trace_seconds = (time.process_time() - started) / 3
    one = features[0]
    price_one = median_seconds(lambda: [envelope.price(one) for _ in range(200)], 5) / 200
    return {
        "build_seconds": build_seconds,
        "load_ms": load_seconds * 1e3,
        "price_10000_ms": price_seconds * 1e3,
        "price_one_us": price_one * 1e6,
        "trace_over_price": trace_seconds / price_one,
    }


def main() -> None:
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")
    figures = time_eight_billion()
    below, above, uncovered = [], [], 0
    for seed, kind in enumerate(KINDS[1:2] if quick() else KINDS):
        worst_below, worst_above, missing = compare(kind, seed)
        below.append(worst_below)
        above.append(worst_above)
        uncovered += missing
    total = PASSES * len(below)
    finish(
        "envelope",
        {
            "worst_below": max(below),
            "worst_above": max(above),
            "passes": total,
            "uncovered": uncovered / total,
            **figures,
        },
        [
            target("worst_below", "le", 0.001),
            target("worst_above", "le", 0.01),
            target("build_seconds", "le", 20),
            target("load_ms", "le", 50),
            target("price_10000_ms", "le", 100),
        ],
    )


if __name__ == "__main__":
    main()
