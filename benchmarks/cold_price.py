"""The cold price of a pass against what the pass really allocates.

Each pass is priced before its model has ever run, from a dry run on ``meta``, and then run: forward, a loss like the
built-in ones, backward. ``error`` is |predicted / observed - 1| of the peak of *new* memory, weights and all else that
is resident left out on both sides. Observed is the allocator's own count; a second instrument, the profiler's
allocator events, measures a subset.

Figures: ``worst_error`` over both instruments, ``median_error``, ``passes`` and ``profiled`` (passes by instrument).
"""

from __future__ import annotations

from pathlib import Path

from _harness import finish, pin_threads, quick, target

pin_threads(2)

import gc  # noqa: E402
import statistics  # noqa: E402
from collections.abc import Sequence  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from _passes import EVERY_PROJECTION, Case, cases, requests, runtime  # noqa: E402
from _profiled import profiled_peak  # noqa: E402

from trainer_rank import LoraConfig, Request, TrainerRank, TransformersRuntime  # noqa: E402
from trainer_rank.meters import Meter, open_meter  # noqa: E402
from trainer_rank.meters.simulated import SimulatedMeter  # noqa: E402

REAL_MODEL = Path(__file__).resolve().parents[1] / ".cache" / "smollm2-135m"
REAL_PASSES = ((300, "full"), (300, "none"), (700, "full"), (1400, "full"))
HEAD_CHUNK_ROWS = (512, 100)
TARGET = 0.005


def step(rank: TrainerRank, batch: Sequence[Request]) -> tuple[int, int]:
    """Run one pass from cleared gradients; return the predicted and the observed peak, in bytes."""
    found = []
    rank.zero_grad()
    gc.collect()
    for micro_batch in rank.forward_micro_batches(batch):
        parts = [result.logprobs.sum() * -1.0 for result in micro_batch.results if result.logprobs is not None]
        total = torch.stack(parts).sum()
        del parts
        total.backward()
        found.append(micro_batch)
    if len(found) != 1 or found[0].observed is None:
        raise AssertionError(f"expected one pass, got {len(found)}")
    return found[0].stats.required_bytes, found[0].observed.peak_bytes


def rank_for(model: TransformersRuntime, meter: Meter) -> TrainerRank:
    """Return a rank that charges nothing for a caller beyond the loss it runs."""
    rows = HEAD_CHUNK_ROWS[model.facts.num_layers % 2]
    return TrainerRank(model, meter=meter, head_chunk_rows=rows, caller_bytes_per_token=0, verify_backend=False)


def profile_cases(chosen: Sequence[Case]) -> list[float]:
    """Return the errors against the profiler, whose events only torch's own allocator reports."""
    errors = []
    for case in chosen:
        torch.set_num_threads(case.threads)
        model = runtime(case)
        batch = requests(case.shape, case.seed, model.facts.vocabulary_size)
        rank = rank_for(model, SimulatedMeter("1TiB"))
        predicted, _ = step(rank, batch)
        rank.zero_grad()
        gc.collect()
        observed = profiled_peak(lambda rank=rank, batch=batch: step(rank, batch))  # type: ignore[misc]
        errors.append(report(str(case), predicted, observed, "profiler"))
    return errors


def measure_cases(chosen: Sequence[Case], meter: Meter) -> list[float]:
    """Return the errors of tiny models against the counting allocator."""
    errors = []
    for case in chosen:
        torch.set_num_threads(case.threads)
        model = runtime(case)
        batch = requests(case.shape, case.seed, model.facts.vocabulary_size)
        predicted, observed = step(rank_for(model, meter), batch)
        errors.append(report(str(case), predicted, observed))
    return errors


def measure_real(meter: Meter) -> list[float]:
    """Return the errors of the real model, one prompt with eight completions per pass."""
    errors = []
    torch.set_num_threads(2)
    for rows, recompute in REAL_PASSES:
        model = TransformersRuntime.from_pretrained(
            REAL_MODEL,
            lora=LoraConfig(r=8, target_modules=EVERY_PROJECTION),
            recompute=recompute,  # type: ignore[arg-type]
            dtype="float32",
        )
        predicted, observed = step(rank_for(model, meter), completions(rows, model.facts.vocabulary_size))
        errors.append(report(f"SmolLM2-135M adapter recompute {recompute:4} {rows} rows", predicted, observed))
        del model
    return errors


def completions(rows: int, vocabulary: int) -> list[Request]:
    """Return eight completions of one prompt, ``rows`` packed rows in all, half of them prompt."""
    tokens = np.random.default_rng(rows).integers(0, vocabulary, rows)
    prompt = tokens[: rows // 2]
    return [
        Request.next_token(np.concatenate([prompt, piece]), trained=[False] * prompt.size + [True] * piece.size)
        for piece in np.array_split(tokens[prompt.size :], 8)
    ]


def report(name: str, predicted: int, observed: int, instrument: str = "allocator") -> float:
    """Print a row of the table and return its error."""
    error = abs(predicted / observed - 1)
    print(f"{name:78} {predicted:>13,} {observed:>13,}  {error:8.5f}  {instrument}", flush=True)
    return error


def main() -> None:
    """Measure, print, judge."""
    chosen = list(cases())[:2] if quick() else list(cases())
    print(f"{'pass':78} {'predicted':>13} {'observed':>13}  {'error':>8}  observed by")
    # First, because the counting allocator replaces torch's own for the life of the process.
    by_profiler = profile_cases(chosen[:: 1 if quick() else 7])
    with open_meter("cpu", cpu="counting") as meter:
        by_allocator = measure_cases(chosen, meter)
        if not quick():
            if not (REAL_MODEL / "config.json").is_file():
                raise SystemExit(f"{REAL_MODEL} is missing; run `make prepare` first")
            by_allocator += measure_real(meter)
    errors = [*by_profiler, *by_allocator]
    figures = {
        "worst_error": max(errors),
        "median_error": statistics.median(errors),
        "passes": len(by_allocator),
        "profiled": len(by_profiler),
    }
    finish("cold_price", figures, [target("worst_error", "le", TARGET), target("passes", "ge", 40)])


if __name__ == "__main__":
    main()
