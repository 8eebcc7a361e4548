"""The training points of the GPU fixtures, and what is known of their devices and engines without running anything."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from trainer_rank.meters.devices import Device, find_device

FOLDER: Final = Path(__file__).resolve().parent / "data" / "agilerl"

_MIB: Final = 1 << 20

ENGINE_BYTES: Final = 700 * _MIB
"""What AgileRL's formulas take a sleeping engine to hold beside the CUDA context, on every device."""


DEVICES: Final = {name: find_device(name) for name in ("NVIDIA A100-SXM4-40GB", "NVIDIA L4")}
"""AgileRL measured their contexts, torch 2.11 with CUDA 13.0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measured update.

    Attributes:
        peak_bytes: Most bytes in use on the device during the update.
        floor_bytes: Bytes in use when the update began, engine asleep and weights on the host.
        clean_floor_bytes: The smallest such reading among the points of the same engine.
        allocated_bytes: torch's own peak. It counts pages that the sleeping engine gave back, so only differences
            between points of one engine mean something.
        reserved_bytes: The same of segments.
        is_pinned: Whether every completion was forced to its full length.
    """

    model: str
    device: Device
    length: int
    micro_batch: int
    group: int
    rank: int
    peak_bytes: int
    floor_bytes: int
    clean_floor_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    is_pinned: bool

    @property
    def rows(self) -> int:
        """Sequences of one forward."""
        return min(self.micro_batch, self.group)

    @property
    def observed_bytes(self) -> int:
        """What the update added to the sleeping engine."""
        return self.peak_bytes - self.clean_floor_bytes


def read_points() -> list[Point]:
    """Return the training points of every file, in the order of the files' names."""
    points: list[Point] = []
    for path in sorted(FOLDER.glob("*.json")):
        points += _with_clean_floors(_points(json.loads(path.read_text(encoding="utf-8"))))
    return points


def _points(profile: dict[str, Any]) -> Iterator[Point]:
    for measured in profile["measured"]:
        if measured["phase"] != "training":
            continue
        knobs = measured["knobs"]
        yield Point(
            model=profile["model_id"],
            device=DEVICES[profile["device"]["name"]],
            length=knobs["seq_len"],
            micro_batch=knobs["micro_batch"],
            group=knobs["group_size"],
            rank=knobs["lora_rank"],
            peak_bytes=measured["device_peak_bytes"],
            floor_bytes=measured["sleeping_baseline_bytes"],
            clean_floor_bytes=measured["sleeping_baseline_bytes"],
            allocated_bytes=measured["torch_max_allocated_bytes"],
            reserved_bytes=measured["torch_max_reserved_bytes"],
            # The sweeps that record this knob are those after completions were pinned.
            is_pinned="memory_efficient_params" in knobs,
        )


def _with_clean_floors(points: Iterable[Point]) -> list[Point]:
    """A process of the point before that has not yet left can only add to a floor, never lower it."""
    found = list(points)
    floors: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for point in found:
        floors[point.length, point.group, point.rank].append(point.floor_bytes)
    return [replace(p, clean_floor_bytes=min(floors[p.length, p.group, p.rank])) for p in found]
