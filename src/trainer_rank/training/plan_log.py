"""The splits of a run's steps, on the disk as they are made, so that an interrupted run repeats them.

One line of ``plans.jsonl`` per step, and one more each time a step is split anew on the way; the last line of a step
holds. A line is ``{"step": 7, "split": [[group, [[start, stop], ...], layout, fingerprint], ...]}``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from trainer_rank.session.split import SplitPart
from trainer_rank.training.line_file import append_line, whole_lines

NAME: Final = "plans.jsonl"


class PlanLog:
    """What was recorded in the file ``path``, and what is added to it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[int, tuple[SplitPart, ...]] = {}
        for line in whole_lines(path):
            entries = json.loads(line)
            self._known[entries["step"]] = tuple(_part(*values) for values in entries["split"])

    def recorded(self, step: int) -> tuple[SplitPart, ...]:
        """Return the split recorded for the 1-based ``step``; empty when it was never begun."""
        return self._known.get(step, ())

    def note(self, step: int, split: Sequence[SplitPart]) -> None:
        """Record the split of a step, unless it is recorded already."""
        if self.recorded(step) == tuple(split):
            return
        self._known[step] = tuple(split)
        parts = [[one.group, one.units, one.layout, one.fingerprint] for one in split]
        append_line(self._path, {"step": step, "split": parts})

    def forget(self) -> None:
        """Replay nothing: every step from now on is split by the memory there is."""
        self._known.clear()


def _part(group: int, units: Sequence[Sequence[int]], layout: int, fingerprint: str) -> SplitPart:
    ranges = tuple((start, stop) for start, stop in units)
    return SplitPart(group=group, units=ranges, layout=layout, fingerprint=fingerprint)
