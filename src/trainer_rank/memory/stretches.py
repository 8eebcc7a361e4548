"""A trace cut into stretches: what is live, by category, after each allocation between two marks.

    trace      Mark(forward, 0) +a +b -a CallMark(root) +c -c CallMark() +d Mark(forward, 1) ...
    stretches  (forward, first, "", 0): b0, b0+a, b0+a+b   (forward, first, root, 0): ...   (forward, first, "", 1): ...

Passes of one model make the same stretches with the same number of allocations, whatever their sizes, as long as they
make the same kinds of calls. That is what lets sizes be solved for (``memory.solve``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainer_rank.errors import EnvelopeError
from trainer_rank.memory.facts import Recompute
from trainer_rank.memory.trace import CallMark, Event, Mark, Trace

KEPT: Final = 0
RECOMPUTED: Final = 1
TEMPORARY: Final = 2
HEAD: Final = 3
GRADIENT: Final = 4
CALLER: Final = 5
NUM_CATEGORIES: Final = 6


def category_names(recompute: Recompute) -> tuple[str, ...]:
    """Return the names of the categories as terms of a price."""
    kept = {"full": "checkpointed inputs", "none": "activations", "auto": "activations and checkpointed inputs"}
    return (kept[recompute], "recomputed activations", "temporaries", "head", "gradients", "caller's loss")


@dataclass(frozen=True, slots=True)
class StretchKey:
    """Which stretch: it comes at most once in a pass, except that a call comes once per call of its kind.

    Attributes:
        phase: Phase of the mark it follows.
        end: ``first`` or ``last`` layer, or empty outside layers. Layers between the two make no stretches. Where some
            layers are recomputed and some are not, each of the two kinds has its own first and last.
        visit: How often the phase had come to that layer before.
        part: Number of calls' groups before it within the mark.
        call: Kind of the call, empty between calls.
        kept: It lies in a layer that keeps its activations while others are recomputed.
    """

    phase: str
    end: str
    visit: int
    part: int
    call: str = ""
    kept: bool = False

    def layer(self, num_layers: int, recomputed: int | None = None) -> int | None:
        """Return the decoder layer it lies in, None outside layers."""
        if not self.end:
            return None
        if self.end == "first":
            return recomputed if self.kept else 0
        return num_layers - 1 if self.kept or recomputed is None else recomputed - 1


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """One stretch of one trace.

    Attributes:
        key: Which.
        number: Position of the call among the calls of its group, 0 between calls.
        live: (1 + allocations, categories) int64 bytes: at its begin and after each allocation.
        left: (categories,) int64 bytes live at its end.
    """

    key: StretchKey
    number: int
    live: NDArray[np.int64]
    left: NDArray[np.int64]


def stretches(trace: Trace) -> Iterator[Stretch]:
    """Yield the stretches of a trace in order."""
    category = _categories(trace)
    visits: Counter[tuple[str, str, bool]] = Counter()
    live = np.zeros(NUM_CATEGORIES, dtype=np.int64)
    key: StretchKey | None = StretchKey("start", "", 0, 0)
    number = 0
    curve = [live.copy()]
    for step in trace.steps:
        if isinstance(step, Event):
            live[category[step.storage]] += step.delta_bytes
            if step.delta_bytes > 0:
                curve.append(live.copy())
            continue
        if key is not None:
            yield Stretch(key, number, np.array(curve), live.copy())
        curve = [live.copy()]
        if isinstance(step, Mark):
            end, kept = _end(step.layer, trace)
            if end is None:
                key = None
            else:
                key = StretchKey(step.phase, end, visits[step.phase, end, kept], 0, kept=kept)
                visits[step.phase, end, kept] += 1
            number = 0
        elif key is not None:
            key, number = _enter(key, number, step)
    if key is not None:
        yield Stretch(key, number, np.array(curve), live.copy())


def stretches_at_depth(shallow: Trace, deeper: Trace, num_layers: int) -> list[Stretch]:
    """Return the stretches of a pass through ``num_layers`` layers from its traces at two smaller depths.

    At the first and the last layer of a phase, and outside layers, live bytes are affine in the depth. Two traces of
    one depth are that depth's own.

    Raises:
        EnvelopeError: The pass makes other allocations at another depth.
    """
    low, high = list(stretches(shallow)), list(stretches(deeper))
    span, beyond = deeper.num_layers - shallow.num_layers, num_layers - deeper.num_layers
    if span == 0:
        return high
    if [(s.key, s.number, len(s.live)) for s in low] != [(s.key, s.number, len(s.live)) for s in high]:
        raise EnvelopeError("a pass makes other allocations at another depth")
    return [
        replace(
            above,
            live=above.live + (above.live - below.live) * beyond // span,
            left=above.left + (above.left - below.left) * beyond // span,
        )
        for below, above in zip(low, high, strict=True)
    ]


def stretches_of_two_kinds(
    base: Trace, more_recomputed: Trace, more_kept: Trace, num_layers: int, recomputed: int
) -> list[Stretch]:
    """Return the stretches of a pass of which the first ``recomputed`` of ``num_layers`` layers run again in backward.

    At the first and the last layer of either kind, and outside layers, live bytes are affine in both counts.

    Args:
        base: The pass with a few layers of each kind.
        more_recomputed, more_kept: With one more of one kind.
        num_layers, recomputed: The pass wanted.

    Raises:
        EnvelopeError: The pass makes other allocations with other counts.
    """
    assert base.recomputed is not None, "a trace of both kinds of layers"
    made, up, along = (list(stretches(trace)) for trace in (base, more_recomputed, more_kept))
    for other in (up, along):
        if [(s.key, s.number, len(s.live)) for s in made] != [(s.key, s.number, len(s.live)) for s in other]:
            raise EnvelopeError("a pass makes other allocations with other numbers of recomputed layers")
    rise = recomputed - base.recomputed
    run = num_layers - recomputed - (base.num_layers - base.recomputed)
    return [
        replace(
            one,
            live=one.live + (two.live - one.live) * rise + (three.live - one.live) * run,
            left=one.left + (two.left - one.left) * rise + (three.left - one.left) * run,
        )
        for one, two, three in zip(made, up, along, strict=True)
    ]


def _enter(key: StretchKey, number: int, call: CallMark) -> tuple[StretchKey, int]:
    """Return the key after a call mark and the position of the call in its group."""
    if not call.kind:
        return replace(key, part=key.part + 1, call=""), 0
    return replace(key, call=call.kind), number + 1 if key.call else 0


def _end(layer: int | None, trace: Trace) -> tuple[str | None, bool]:
    """Return which end of its kind of layers a layer is, None in between, and whether its kind keeps activations."""
    if layer is None:
        return "", False
    kept = trace.recomputed is not None and layer >= trace.recomputed
    begin = trace.recomputed if kept and trace.recomputed is not None else 0
    stop = trace.num_layers if kept or trace.recomputed is None else trace.recomputed
    return "first" if layer == begin else "last" if layer == stop - 1 else None, kept


def _categories(trace: Trace) -> dict[int, int]:
    """Return the category of each storage, from where it appears and where it vanishes."""
    born: dict[int, tuple[str, str]] = {}
    died: dict[int, str] = {}
    kept: set[int] = set()
    phase, call, forward_is_over = "start", "", False
    for step in trace.steps:
        if isinstance(step, Mark):
            if phase == "outputs" and not forward_is_over:
                forward_is_over = True
                kept = born.keys() - died.keys()
            phase, call = step.phase, ""
        elif isinstance(step, CallMark):
            call = step.kind
        elif step.delta_bytes > 0:
            born[step.storage] = phase, call
        else:
            died[step.storage] = phase
    return {storage: _category(storage in kept, *where, died.get(storage, "")) for storage, where in born.items()}


def _category(is_kept: bool, phase: str, call: str, died: str) -> int:
    if phase in ("head", "outputs") or call == "chunk":
        return HEAD
    if phase == "loss":
        return CALLER
    if is_kept:
        return KEPT
    if phase in ("backward", "recompute") and not died:
        return GRADIENT
    if phase == "recompute" and died == "backward":
        return RECOMPUTED
    return TEMPORARY
