"""How fast this machine runs passes of a model: measured on the spot, or read from a run that was recorded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from trainer_rank.errors import ConfigError
from trainer_rank.planner.speed import TimedPass
from trainer_rank.training.line_file import whole_lines

LONGEST_SECONDS: Final = 4.0
"""Time of the largest pass that is measured on the spot, about."""

BRANCHES: Final = (1, 6, 24)
"""Branches of the measured trees."""


def recorded_passes(run: Path) -> tuple[dict[str, Any], list[TimedPass]]:
    """Return the environment of a recorded run and its passes that ran alone, but for the first, which warms up.

    Raises:
        ConfigError: The folder has no such records.
    """
    learned = run / "learned.json"
    if not learned.is_file() or not (run / "decisions.jsonl").is_file():
        raise ConfigError(
            f"fit-speed: {run} must be a run folder with learned.json and decisions.jsonl; give one that this version "
            "trained, or a configuration to measure with"
        )
    state = json.loads(learned.read_text(encoding="utf-8"))
    lines = (json.loads(line) for line in whole_lines(run / "decisions.jsonl"))
    return state["environment"], timed_passes(lines)[1:]


def timed_passes(lines: Iterable[Mapping[str, Any]]) -> list[TimedPass]:
    """Return the passes of decision and observation records that were alone in their micro-batch, in order."""
    pending: dict[int, TimedPass] = {}
    found = []
    for line in lines:
        if line["kind"] == "admission" and len(line["passes"]) == 1:
            (one,) = line["passes"]
            share = 1.0
            if line["recompute"] == "none":
                share = 0.0
            elif one["recomputed"] is not None:
                share = one["recomputed"] / line["facts"]["num_layers"]
            pending[line["decision"]] = TimedPass(
                packed_rows=one["packed_rows"], segments=one["segments"], head_rows=one["head_rows"],
                recomputed=share, no_grad=one["no_grad"], seconds=0.0,
            )  # fmt: skip
        elif line["kind"] == "observation" and line["decision"] in pending:
            one = pending.pop(line["decision"])
            if one.packed_rows:
                found.append(TimedPass(
                    packed_rows=one.packed_rows, segments=one.segments, head_rows=one.head_rows,
                    recomputed=one.recomputed, no_grad=one.no_grad, seconds=line["seconds"],
                ))  # fmt: skip
    return found


def measured_passes(
    config_path: Path, *, tell: Callable[[str], None] = lambda line: None
) -> tuple[dict[str, Any], list[TimedPass]]:
    """Run passes of many sizes with the model of a configuration and return its environment and their times.

    Each size runs twice and the faster time counts. Sizes go up to what takes about ``LONGEST_SECONDS``, fits into the
    memory budget and the model's context. Gradients are dropped; no weight changes.
    """
    # Torch takes seconds to import, and a recorded run needs none of it.
    import torch

    from trainer_rank.errors import TrainerRankMemoryError
    from trainer_rank.requests import Request
    from trainer_rank.training.load_config import load_config
    from trainer_rank.training.load_rank import load_model, load_rank

    config = load_config(config_path)
    lines: list[dict[str, Any]] = []
    runtime = load_model(config)
    rank = load_rank(
        config.model_copy(update={"learned": "run"}), runtime, on_decision=lambda record: lines.append(record.as_line())
    )
    draw = np.random.default_rng(config.seed)

    def run(rows: int, branches: int, share: float) -> float | None:
        """Return the faster of two runs, None when such a pass does not fit in one piece."""
        own = max(2, rows // (2 * branches)) if branches > 1 else 0
        prompt = draw.integers(0, runtime.facts.vocabulary_size, rows - branches * own)
        requests = []
        for _ in range(branches):
            tokens = np.concatenate([prompt, draw.integers(0, runtime.facts.vocabulary_size, own)])
            requests.append(Request.next_token(tokens, trained=np.arange(tokens.size) >= (1 - share) * tokens.size))
        times = []
        for _ in range(2):
            lines.clear()
            try:
                for micro_batch in rank.forward_micro_batches(requests):
                    parts = [one.logprobs.sum() for one in micro_batch.results if one.logprobs is not None]
                    torch.stack(parts).sum().backward()
                    del micro_batch, parts
            except TrainerRankMemoryError:
                return None
            finally:
                rank.zero_grad()
            if len(timed := timed_passes(lines)) != 1:
                return None
            times.append(timed[0])
        best = min(times, key=lambda one: one.seconds)
        size = f"{best.packed_rows:>6} rows, {best.segments:>3} segments, {best.head_rows:>6} head rows"
        tell(f"{size}: {best.seconds:.3f} s")
        found.append(best)
        return best.seconds

    found: list[TimedPass] = []
    largest = 32
    while (seconds := run(largest, 1, 0.5)) is not None and seconds < LONGEST_SECONDS / 2:
        if 2 * largest > runtime.facts.max_positions:
            break
        largest *= 2
    if seconds is None:
        largest //= 2
    for rows in (largest // 8, largest // 4, largest // 2, largest):
        for number, branches in enumerate(BRANCHES):
            if rows >= 8 * branches:
                run(rows, branches, (0.2, 0.9)[number % 2])
    return rank.learned()["environment"], found
