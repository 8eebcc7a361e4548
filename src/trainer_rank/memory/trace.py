"""Allocation events of a dry run and their fold into peaks.

A trace is the allocation timeline of one pass: storages that appear and vanish, between marks that say which phase and
which layer is running. Folding keeps, per stretch between two marks, the largest number of live bytes. Storages are
counted, not references to them: two tensors on one storage cost once.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """One storage that appeared (``delta_bytes`` > 0) or vanished (< 0); both carry its number."""

    delta_bytes: int
    storage: int = 0


@dataclass(frozen=True, slots=True)
class Mark:
    """What runs from here on: a phase (``forward``, ``head``, ``loss``, ``backward``, ...) and a layer, if any."""

    phase: str
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class CallMark:
    """A call begins whose memory depends on its own sizes (a run of the tree in attention, a chunk of the head).

    An empty ``kind`` says that the last one ended.
    """

    kind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Marks and events in the order they happened, for a model of ``num_layers`` layers.

    ``recomputed`` of them, the first, run again in backward, and the others keep their activations; None where all
    layers are treated alike.
    """

    steps: tuple[Mark | CallMark | Event, ...]
    num_layers: int
    recomputed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """The largest live bytes while ``mark`` was in force, above what was live when the trace began."""

    mark: Mark
    peak_bytes: int
    end_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A folded trace.

    Attributes:
        instants: One per mark, in order; a mark that comes again (a layer run twice) makes another instant.
        num_layers: Layers of the traced model.
    """

    instants: tuple[Instant, ...]
    num_layers: int

    @property
    def peak(self) -> Instant:
        """The instant with the most live bytes; the first of equals."""
        return max(self.instants, key=lambda instant: instant.peak_bytes)

    def end_of(self, phase: str) -> int:
        """Return the bytes live when the last instant of a phase ended; 0 when the phase never came."""
        ends = [instant.end_bytes for instant in self.instants if instant.mark.phase == phase]
        return ends[-1] if ends else 0


def fold(trace: Trace) -> Timeline:
    """Return the peaks of a trace per mark. Events before the first mark belong to a phase named ``start``."""
    instants: list[Instant] = []
    mark, live, peak = Mark("start"), 0, 0
    for step in trace.steps:
        if isinstance(step, Mark):
            instants.append(Instant(mark=mark, peak_bytes=peak, end_bytes=live))
            mark, peak = step, live
        elif isinstance(step, Event):
            live += step.delta_bytes
            peak = max(peak, live)
    instants.append(Instant(mark=mark, peak_bytes=peak, end_bytes=live))
    return Timeline(instants=tuple(instants), num_layers=trace.num_layers)
