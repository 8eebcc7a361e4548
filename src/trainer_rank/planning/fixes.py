"""What makes a step fit that does not: each change planned anew, so that none is a guess.

Changes of the options come first: those that cost no more than speed or precision, then adapters instead of all
weights. Several at once are tried only when none does it alone. When no options do it, requests are shortened or left
out. A larger device comes last, and is always named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from trainer_rank.meters.devices import DEVICES, Device
from trainer_rank.planning.options import Options
from trainer_rank.planning.report import Fix, PlanReport

Again = Callable[[Options, Device], PlanReport]
"""Plans the same requests with other options or on another device."""

Shortened = Callable[[Options, int], tuple[str, PlanReport] | None]
"""Plans the requests with none of more than so many tokens; the change in words, or None when that leaves nothing."""

_FEWEST_CHUNK_ROWS: Final = 64
_LORA_RANK: Final = 16
_SHARES: Final = (1.0, 0.95, 0.8)
_WORTH_IT: Final = 1.25
"""How much longer requests must become for other options to be named beside a shorter length."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Another value of one option, in words."""

    words: str
    field: str
    value: int | str


Parts = tuple[_Part, ...]


@dataclass(frozen=True, slots=True)
class _Shorter:
    """Requests of no more than ``longest`` tokens, the changes in words, and their plan."""

    text: str
    longest: int
    plan: PlanReport


def find_fixes(
    options: Options, device: Device, refused: PlanReport, again: Again, shortened: Shortened | None
) -> Iterator[Fix]:
    """Yield the changes that make it fit, those that change least first and a larger device last."""

    def fix(words: str, plan: PlanReport) -> Fix:
        return Fix(change=words, before_bytes=refused.peak_bytes, after_bytes=plan.peak_bytes, passes=len(plan.passes))

    def changed(parts: Parts) -> PlanReport:
        return again(_options(options, parts), device)

    found = False
    # Under the options that take least without training less, requests need to be shortened least.
    thrifty: Parts = ()
    least = refused
    for parts in _changes(options, refused):
        if found and len(parts) > 1:
            continue
        plan = changed(parts)
        if plan.fits:
            found = True
            parts, plan = _fewest(parts, plan, changed)
            yield fix(_text(parts), plan)
        elif all(part.field != "lora_rank" for part in parts):
            thrifty, least = parts, plan
    if not found and shortened is not None:
        plain = _shorter((), options, refused, shortened)
        best = _shorter(thrifty, _options(options, thrifty), least, shortened) if thrifty else None
        if best is not None and (plain is None or best.longest >= _WORTH_IT * plain.longest):
            yield fix(best.text, best.plan)
        if plain is not None:
            yield fix(plain.text, plain.plan)
    for larger in sorted(DEVICES, key=lambda one: one.usable_bytes):
        if larger.usable_bytes > max(device.usable_bytes, refused.peak_bytes):
            plan = again(options, larger)
            if plan.fits:
                yield fix(f"device: {device.name} -> {larger.name}", plan)
                return


def _changes(options: Options, refused: PlanReport) -> Iterator[Parts]:
    """Yield single changes of the options, those without a price first; then several at once."""
    cheap: list[_Part] = []
    cap, rows = options.max_packed_tokens, options.head_chunk_rows
    if cap is not None and refused.worst is not None and refused.worst.packed_rows > cap:
        needed = refused.worst.packed_rows
        cheap.append(_Part(f"max packed tokens: {cap:,} -> {needed:,}", "max_packed_tokens", needed))
    if rows > _FEWEST_CHUNK_ROWS:
        fewer = max(_FEWEST_CHUNK_ROWS, min(512, rows // 4))
        cheap.append(_Part(f"chunk the head: {rows:,} -> {fewer:,} rows", "head_chunk_rows", fewer))
    if options.recompute == "none":
        cheap.append(_Part("recompute: none -> full", "recompute", "full"))
    if options.dtype == "float32":
        cheap.append(_Part("dtype: float32 -> bfloat16", "dtype", "bfloat16"))
    yield from ((part,) for part in cheap)
    if len(cheap) > 1:
        yield tuple(cheap)
    if options.lora_rank is None:
        adapters = _Part(f"train adapters of rank {_LORA_RANK} instead of all weights", "lora_rank", _LORA_RANK)
        yield (adapters,)
        if cheap:
            yield (adapters, *cheap)


def _fewest(parts: Parts, plan: PlanReport, changed: Callable[[Parts], PlanReport]) -> tuple[Parts, PlanReport]:
    """Return a change that fits without those of its parts that it can do without; each was tried alone before."""
    for part in parts:
        fewer = tuple(one for one in parts if one is not part)
        if len(fewer) > 1:
            without = changed(fewer)
            if without.fits:
                parts, plan = fewer, without
    return parts, plan


def _options(options: Options, parts: Parts) -> Options:
    values: dict[str, Any] = {part.field: part.value for part in parts}
    return replace(options, **values)


def _text(parts: Parts) -> str:
    return " and ".join(part.words for part in parts)


def _shorter(parts: Parts, options: Options, refused: PlanReport, shortened: Shortened) -> _Shorter | None:
    """Return the longest of a few lengths that fits under options with parts changed; None when none does."""
    if refused.worst is None or not refused.short_bytes:
        return None
    for length in _lengths(refused):
        found = shortened(options, length)
        if found is not None and found[1].fits:
            return _Shorter(" and ".join((*(part.words for part in parts), found[0])), length, found[1])
    return None


def _lengths(refused: PlanReport) -> Iterator[int]:
    """Yield lengths that should fit, from the bytes per token of the request that does not."""
    assert refused.worst is not None, "asked of a request that was priced"
    needed = refused.worst.required_bytes
    length = refused.worst.logical_tokens * max(0, needed - refused.short_bytes) // max(1, needed)
    for share in _SHARES:
        tokens = int(length * share)
        yield tokens - tokens % 64 if tokens > 1024 else tokens
