"""Predicted peaks of real passes against the profiler's exact allocator peak, beside two usual ways to predict.

Each pass is priced by its model's envelope before it runs, then run for real: forward, a loss like the built-in ones,
backward. Observed is the peak of the profiler's allocator events. Errors are of the **incremental** peak, which is what
an admission decides on; ``total_*`` are of the whole, weights included, which is what is usually published.

Rivals, on the same passes: ``formula_*`` is the Megatron-style activation formula (Korthikanti et al., arXiv
2205.05198, table 2 without the attention matrix, or one layer's share and all inputs under full recompute) with logits
and gradients added; ``rate_*`` is a rate in bytes per packed token learned from every other pass of the same model.

Figures: ``median``, ``p95`` and ``worst_under`` (largest shortfall as a share of the observed peak) of each.
"""

from __future__ import annotations

from pathlib import Path

from _harness import finish, pin_threads, quick, target

pin_threads(1)

import gc  # noqa: E402
import warnings  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from dataclasses import dataclass  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from _passes import EVERY_PROJECTION, Case, cases, requests, runtime  # noqa: E402
from _profiled import profiled_peak, run_pass  # noqa: E402

from trainer_rank import LoraConfig, Request, TransformersRuntime  # noqa: E402
from trainer_rank.executor.envelope_pricer import EnvelopePricer, make_envelope  # noqa: E402
from trainer_rank.planner import PassWork, pass_work  # noqa: E402

REAL_MODEL = Path(__file__).resolve().parents[1] / ".cache" / "smollm2-135m"
REAL_ROWS = (150, 400, 900)
SHAPES = ("single", "tiny", "labels", "apart", "flat", "ragged", "wide", "chain", "random", "random")
CHUNK_ROWS = 100


@dataclass(frozen=True, slots=True)
class Pass:
    """One priced and measured pass, in bytes."""

    model: str
    packed_rows: int
    resident: int
    observed: int
    predicted: int
    formula: int


def formula(model: TransformersRuntime, work: PassWork) -> int:
    """Return the textbook estimate: activations by hidden size, float32 logits, gradients."""
    facts = model.facts
    width = {"float64": 8, "float32": 4, "bfloat16": 2}[facts.dtype]
    rows = work.batch.packed_rows
    layer = 34 * rows * facts.hidden_size * width // 2
    inputs = rows * facts.hidden_size * width
    kept = facts.num_layers * inputs + layer if model.recompute == "full" else facts.num_layers * layer
    return kept + 4 * work.head.num_rows * facts.vocabulary_size + facts.trainable_bytes


def measure(name: str, model: TransformersRuntime, batches: list[list[Request]]) -> Iterator[Pass]:
    """Yield each batch as one pass, priced by the model's envelope and then profiled."""
    envelope = make_envelope(model)
    pricer = EnvelopePricer(model, head_chunk_rows=CHUNK_ROWS, caller_bytes_per_token=0)
    for batch in batches:
        work = pass_work(batch, range(len(batch)))
        predicted = envelope.price(pricer.features(work)).required_bytes
        run_pass(model, work, CHUNK_ROWS)  # Once before: what libraries allocate at first use is no pass's.
        gc.collect()
        observed = profiled_peak(lambda work=work: run_pass(model, work, CHUNK_ROWS))  # type: ignore[misc]
        print(f"{name:66} {work.batch.packed_rows:>5} rows {predicted:>13,} {observed:>13,} "
              f"{predicted / observed - 1:+.5f}", flush=True)  # fmt: skip
        yield Pass(name, work.batch.packed_rows, model.facts.weight_bytes, observed, predicted, formula(model, work))


def tiny_models() -> Iterator[tuple[str, TransformersRuntime, list[list[Request]]]]:
    """Yield each way to train a tiny model, with random trees."""
    ways: dict[tuple[str, str, str], Case] = {}
    for case in cases():
        ways.setdefault((case.family, case.trained, case.recompute), case)
    for number, case in enumerate(list(ways.values())[: 1 if quick() else None]):
        torch.set_num_threads(1)
        model = runtime(case)
        vocabulary = model.facts.vocabulary_size
        shapes = SHAPES[:2] if quick() else SHAPES
        yield str(case), model, [requests(shape, 50 * number + seed, vocabulary) for seed, shape in enumerate(shapes)]


def real_models() -> Iterator[tuple[str, TransformersRuntime, list[list[Request]]]]:
    """Yield the 135M model under each recompute mode, one prompt with eight completions per pass."""
    for recompute in ("full", "none"):
        model = TransformersRuntime.from_pretrained(
            REAL_MODEL,
            lora=LoraConfig(r=8, target_modules=EVERY_PROJECTION),
            recompute=recompute,
            dtype="float32",
        )
        batches = []
        for rows in REAL_ROWS:
            tokens = np.random.default_rng(rows).integers(0, model.facts.vocabulary_size, rows)
            prompt = tokens[: rows // 2]
            batches.append(
                [
                    Request.next_token(
                        np.concatenate([prompt, piece]), trained=[False] * prompt.size + [True] * piece.size
                    )
                    for piece in np.array_split(tokens[prompt.size :], 8)
                ]
            )
        yield f"SmolLM2-135M adapter recompute {recompute}", model, batches


def rates(passes: list[Pass]) -> list[int]:
    """Return the learned-rate estimate of each pass, from the passes of its model that have the other parity."""
    found = []
    for number, one in enumerate(passes):
        others = [other.observed / other.packed_rows for place, other in enumerate(passes)
                  if other.model == one.model and place % 2 != number % 2]  # fmt: skip
        found.append(int(np.mean(others) * one.packed_rows))
    return found


def figures(prefix: str, predicted: list[int], observed: list[int]) -> dict[str, float]:
    error = np.array(predicted) / np.array(observed) - 1
    return {
        f"{prefix}median": float(np.median(np.abs(error))),
        f"{prefix}p95": float(np.quantile(np.abs(error), 0.95)),
        f"{prefix}worst_under": float(max(0.0, -error.min())),
    }


def main() -> None:
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")
    if not quick() and not (REAL_MODEL / "config.json").is_file():
        raise SystemExit(f"{REAL_MODEL} is missing; run `make prepare` first")
    passes = [one for name, model, batches in tiny_models() for one in measure(name, model, batches)]
    if not quick():
        passes += [one for name, model, batches in real_models() for one in measure(name, model, batches)]
    observed = [one.observed for one in passes]
    predicted = [one.predicted for one in passes]
    resident = [one.resident for one in passes]
    found: dict[str, float] = {
        **figures("", predicted, observed),
        **figures(
            "total_",
            [a + b for a, b in zip(predicted, resident, strict=True)],
            [a + b for a, b in zip(observed, resident, strict=True)],
        ),
        **figures("formula_", [one.formula for one in passes], observed),
        **figures("rate_", rates(passes), observed),
        "passes": len(passes),
    }
    targets = [target("median", "le", 0.002), target("p95", "le", 0.01), target("worst_under", "le", 0.005)]
    finish("memory_accuracy", found, targets)


if __name__ == "__main__":
    main()
