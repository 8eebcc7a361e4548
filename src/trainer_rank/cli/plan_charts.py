"""The charts of a plan's page, as plotly's own records: traces and layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from trainer_rank.cli.plan_display import at, kinds, shares
from trainer_rank.planning.report import PlanReport, Tree
from trainer_rank.units import GIB, format_bytes

Chart = tuple[list[Any], dict[str, Any]]

MOST_PASSES: Final = 60
MOST_SEGMENTS: Final = 1500
COLOURS: Final = ("#8a8f98", "#2f6fb0", "#a0509c", "#c8503c", "#2a9d8f", "#6aa84f", "#d9a514")
_SHADES: Final = ("#9cc9e3", "#b5ddd1", "#dbe8b4", "#f3dca0", "#f0c3a8", "#dcc3de")
_INK: Final = "#22272e"


def capacity(report: PlanReport) -> Chart:
    """Return the device at the worst peak as one bar."""
    traces = [
        {"type": "bar", "orientation": "h", "name": name, "y": [""], "x": [share / GIB],
         "marker": {"color": colour}, "hovertemplate": f"{name}<br>{format_bytes(share)}<extra></extra>"}
        for (name, _, share), colour in zip(kinds(report), COLOURS, strict=True) if share
    ]  # fmt: skip
    end = max(report.capacity_bytes, report.peak_bytes) / GIB * 1.02
    return traces, {
        "barmode": "stack", "xaxis": {"title": {"text": "GiB"}, "range": [0, end], "gridcolor": "#e4e7eb"},
        "yaxis": {"visible": False}, "margin": {"l": 20, "r": 20, "t": 10, "b": 40},
        "legend": {"orientation": "h", "y": -0.9, "x": 0, "traceorder": "normal"},
        "shapes": [_limit("x", report.capacity_bytes / GIB)],
    }  # fmt: skip


def _limit(axis: str, value: float) -> dict[str, Any]:
    """Return the line of the device's capacity."""
    ends = {"x0": value, "x1": value, "y0": 0, "y1": 1} if axis == "x" else {"x0": 0, "x1": 1, "y0": value, "y1": value}
    other = "yref" if axis == "x" else "xref"
    return {"type": "line", **ends, other: "paper", "line": {"color": "#b3261e", "width": 2, "dash": "dash"}}


def timeline(report: PlanReport) -> Chart | None:
    """Return the worst pass from its first phase to its last; None when it was not traced."""
    if not report.timeline:
        return None
    base = report.base_bytes
    labels = [f"{number + 1} {at(one.phase, one.layer)}" for number, one in enumerate(report.timeline)]
    places = list(range(len(labels)))
    peaks = [(base + one.peak_bytes) / GIB for one in report.timeline]
    ends = [(base + one.end_bytes) / GIB for one in report.timeline]
    flat = [("outside torch", 0), ("weights", 1), ("gradients", 2), ("optimizer state", 3)]
    worst = set(report.worst.terms) if report.worst is not None else set()
    # From the left edge of the first bar to the right edge of the last.
    edges = [-0.5, *places, len(places) - 0.5]
    standing = {index: sum(share for kind, name, share in shares(report) if kind == index and name not in worst)
                for _, index in flat}  # fmt: skip
    traces: list[Any] = [
        {"type": "scatter", "mode": "lines", "name": name, "stackgroup": "standing", "x": edges,
         "y": [standing[index] / GIB] * len(edges), "line": {"width": 0}, "fillcolor": COLOURS[index],
         "hovertemplate": f"{name} {format_bytes(standing[index])}<extra></extra>"}
        for name, index in flat if standing[index]
    ]  # fmt: skip
    traces += [
        {"type": "bar", "name": "peak of the pass", "x": places, "base": base / GIB, "width": 0.75,
         "y": [peak - base / GIB for peak in peaks], "marker": {"color": COLOURS[5]},
         "customdata": [[label.partition(" ")[2], format_bytes(int(peak * GIB))]
                        for label, peak in zip(labels, peaks, strict=True)],
         "hovertemplate": "%{customdata[0]}<br>device holds %{customdata[1]}<extra></extra>"},
        {"type": "scatter", "mode": "lines+markers", "name": "left at its end", "x": places, "y": ends,
         "line": {"color": _INK, "width": 2, "shape": "hvh"}, "marker": {"size": 5},
         "hovertemplate": "%{y:.2f} GiB left<extra></extra>"},
    ]  # fmt: skip
    top = max(*peaks, report.peak_bytes / GIB)
    limit, near, note = _room(report, top)
    return traces, {
        "xaxis": {"tickvals": places, "ticktext": [label.partition(" ")[2] for label in labels], "tickangle": -35,
                  "range": [edges[0], edges[-1]]},
        "yaxis": {"title": {"text": "GiB on the device"}, "gridcolor": "#e4e7eb", "range": [0, near * 1.08]},
        "shapes": limit, "annotations": note, "bargap": 0.2,
        "margin": {"l": 70, "r": 20, "t": 30, "b": 110}, "legend": {"orientation": "h", "y": -0.45, "x": 0},
    }  # fmt: skip


def passes(report: PlanReport) -> Chart | None:
    """Return the passes of the step beside what stands; None when there is none."""
    shown = report.passes[:MOST_PASSES]
    if not shown:
        return None
    names = list(dict.fromkeys(name for one in shown for name in one.terms))
    numbers = [str(number) for number in range(1, len(shown) + 1)]
    hover = [
        f"{one.requests} requests, {one.packed_rows:,} packed of {one.logical_tokens:,} logical tokens, "
        f"{one.head_rows:,} head rows<br>needs {format_bytes(one.required_bytes)}, peak in {at(one.phase, one.layer)}"
        for one in shown
    ]
    palette = ("#2a9d8f", "#6aa84f", "#9bc53d", "#e76f51", "#a0509c", "#d9a514", "#8a8f98")
    base = report.base_bytes
    traces: list[Any] = [
        {"type": "bar", "name": "resident, optimizer state, gradients", "x": numbers, "y": [base / GIB] * len(shown),
         "marker": {"color": "#c9ced6"}, "hovertemplate": f"{format_bytes(base)} beside every pass<extra></extra>"}
    ]  # fmt: skip
    traces += [
        {"type": "bar", "name": name, "x": numbers, "y": [one.terms.get(name, 0) / GIB for one in shown],
         "marker": {"color": palette[place % len(palette)]}, "customdata": hover,
         "hovertemplate": f"{name} %{{y:.3f}} GiB<br>%{{customdata}}<extra>pass %{{x}}</extra>"}
        for place, name in enumerate(names)
    ]  # fmt: skip
    traces.append(
        {"type": "scatter", "mode": "markers", "name": "left from forward to backward", "x": numbers,
         "y": [(base + one.retained_bytes) / GIB for one in shown], "marker": {"color": _INK, "symbol": "line-ew-open",
         "size": 22, "line": {"width": 2}}, "hovertemplate": "%{y:.2f} GiB<extra></extra>"}
    )  # fmt: skip
    top = (base + max(one.required_bytes for one in shown)) / GIB
    limit, near, note = _room(report, top)
    return traces, {
        "barmode": "stack", "xaxis": {"title": {"text": "pass"}, "type": "category"},
        "yaxis": {"title": {"text": "GiB on the device"}, "gridcolor": "#e4e7eb", "range": [0, near * 1.08]},
        "bargap": 0.3 if len(shown) > 4 else 0.8, "shapes": limit, "annotations": note,
    }  # fmt: skip


def _room(report: PlanReport, top: float) -> tuple[list[Any], float, list[Any]]:
    """Return the line of the device's capacity, where the axis ends, and a note.

    A device far larger than the step would flatten the chart; its line is then left out and named instead.
    """
    capacity = report.capacity_bytes / GIB
    if capacity <= 2.5 * top:
        return [_limit("y", capacity)], max(capacity, top), []
    words = f"the device has {format_bytes(report.capacity_bytes)}, above this chart"
    return [], top, [{"xref": "paper", "yref": "paper", "x": 1, "y": 1.06, "showarrow": False, "text": words}]


def _depths(parents: Sequence[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def prefix_tree(tree: Tree | None) -> Chart | None:
    """Return the prefix tree of the worst pass; None when there is none."""
    if tree is None or not tree.rows:
        return None
    parents, rows, ends = tree.parent[:MOST_SEGMENTS], tree.rows[:MOST_SEGMENTS], tree.ends[:MOST_SEGMENTS]
    roots = sum(parent < 0 for parent in parents)
    # One box around several roots, so that the chart has one whole.
    around = [] if roots == 1 else ["all"]
    colours = ["#e4e7eb"] * len(around) + [_SHADES[depth % len(_SHADES)] for depth in _depths(parents)]
    trace = {
        "type": "icicle", "branchvalues": "remainder", "tiling": {"orientation": "v"},
        "ids": [*around, *(str(number) for number in range(len(rows)))],
        "labels": [*("pass" for _ in around), *(f"{count:,}" for count in rows)],
        "parents": [*("" for _ in around),
                    *(str(parent) if parent >= 0 else "all" if around else "" for parent in parents)],
        "values": [*(0 for _ in around), *rows],
        "customdata": [*("everything" for _ in around),
                       *(f"{count:,} rows, {ended} request{'' if ended == 1 else 's'} end here"
                         for count, ended in zip(rows, ends, strict=True))],
        "hovertemplate": "%{customdata}<extra></extra>", "marker": {"colors": colours},
    }  # fmt: skip
    return [trace], {"margin": {"l": 20, "r": 20, "t": 10, "b": 10}}
