"""What makes a step fit that does not: each change planned anew, so that none is a guess."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from trainer_rank.meters.devices import DEVICES, Device
from trainer_rank.planning.options import Options
from trainer_rank.planning.report import Fix, PlanReport

Again = Callable[[Options, Device], PlanReport]
"""Plans the same requests with other options or on another device."""

Shortened = Callable[[int], tuple[str, PlanReport] | None]
"""Plans the requests with none of more than so many tokens; the change in words, or None when that leaves nothing."""

_FEWEST_CHUNK_ROWS: Final = 64
_TOGETHER: Final = "all of these together"
_LORA_RANK: Final = 16
_SHARES: Final = (1.0, 0.95, 0.8)


def find_fixes(
    options: Options, device: Device, refused: PlanReport, again: Again, shortened: Shortened | None
) -> Iterator[Fix]:
    """Yield the changes that make it fit, those that cost least first and a larger device last."""

    def fix(change: str, plan: PlanReport) -> Fix:
        return Fix(change=change, before_bytes=refused.peak_bytes, after_bytes=plan.peak_bytes, passes=len(plan.passes))

    least: int | None = None
    for change, changed in _changes(options, refused):
        plan = again(changed, device)
        # All together may be no better than one of them alone.
        if plan.fits and (least is None or change != _TOGETHER or plan.peak_bytes < least):
            least = plan.peak_bytes if least is None else min(least, plan.peak_bytes)
            yield fix(change, plan)
    if least is None and refused.short_bytes and refused.worst is not None and shortened is not None:
        for length in _lengths(refused):
            shorter = shortened(length)
            if shorter is not None and shorter[1].fits:
                yield fix(*shorter)
                break
    for larger in sorted(DEVICES, key=lambda one: one.usable_bytes):
        if larger.usable_bytes > max(device.usable_bytes, refused.peak_bytes):
            plan = again(options, larger)
            if plan.fits:
                yield fix(f"device: {device.name} -> {larger.name}", plan)
                return


def _changes(options: Options, refused: PlanReport) -> Iterator[tuple[str, Options]]:
    """Yield single changes of the options, those without a price first; then all of those; then what trains less."""
    together, singles = options, 0
    cap = options.max_packed_tokens
    if cap is not None and refused.worst is not None and refused.worst.packed_rows > cap:
        together, singles = replace(together, max_packed_tokens=refused.worst.packed_rows), singles + 1
        yield f"max packed tokens: {cap:,} -> {refused.worst.packed_rows:,}", together
    rows = options.head_chunk_rows
    if rows > _FEWEST_CHUNK_ROWS:
        fewer = max(_FEWEST_CHUNK_ROWS, min(512, rows // 4))
        together, singles = replace(together, head_chunk_rows=fewer), singles + 1
        yield f"chunk the head: {rows:,} -> {fewer:,} rows", replace(options, head_chunk_rows=fewer)
    if options.recompute == "none":
        together, singles = replace(together, recompute="full"), singles + 1
        yield "recompute: none -> full", replace(options, recompute="full")
    if options.dtype == "float32":
        together, singles = replace(together, dtype="bfloat16"), singles + 1
        yield "dtype: float32 -> bfloat16", replace(options, dtype="bfloat16")
    if singles > 1:
        yield _TOGETHER, together
    if options.lora_rank is None:
        yield f"train adapters of rank {_LORA_RANK} instead of all weights", replace(together, lora_rank=_LORA_RANK)


def _lengths(refused: PlanReport) -> Iterator[int]:
    """Yield lengths that should fit, from the bytes per token of the request that does not."""
    assert refused.worst is not None, "asked of a request that was priced"
    needed = refused.worst.required_bytes
    length = refused.worst.logical_tokens * max(0, needed - refused.short_bytes) // max(1, needed)
    for share in _SHARES:
        tokens = int(length * share)
        yield tokens - tokens % 64 if tokens > 1024 else tokens
