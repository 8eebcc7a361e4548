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
    kept = "checkpointed inputs" if recompute == "full" else "activations"
    return (kept, "recomputed activations", "temporaries", "head", "gradients", "caller's loss")


@dataclass(frozen=True, slots=True)
class StretchKey:
    """Which stretch: it comes at most once in a pass, except that a call comes once per call of its kind.

    Attributes:
        phase: Phase of the mark it follows.
        end: ``first`` or ``last`` layer, or empty outside layers. Layers between the two make no stretches.
        visit: How often the phase had come to that layer before.
        part: Number of calls' groups before it within the mark.
        call: Kind of the call, empty between calls.
    """

    phase: str
    end: str
    visit: int
    part: int
    call: str = ""

    def layer(self, num_layers: int) -> int | None:
        """Return the decoder layer it lies in, None outside layers."""
        return None if not self.end else 0 if self.end == "first" else num_layers - 1


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
    visits: Counter[tuple[str, str]] = Counter()
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
            end = _end(step.layer, trace.num_layers)
            if end is None:
                key = None
            else:
                key = StretchKey(step.phase, end, visits[step.phase, end], 0)
                visits[step.phase, end] += 1
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


def _enter(key: StretchKey, number: int, call: CallMark) -> tuple[StretchKey, int]:
    """Return the key after a call mark and the position of the call in its group."""
    if not call.kind:
        return StretchKey(key.phase, key.end, key.visit, key.part + 1), 0
    return StretchKey(key.phase, key.end, key.visit, key.part, call.kind), number + 1 if key.call else 0


def _end(layer: int | None, num_layers: int) -> str | None:
    if layer is None:
        return ""
    return "first" if layer == 0 else "last" if layer == num_layers - 1 else None


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
