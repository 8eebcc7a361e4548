"""A plan as one self-contained page: memory over the step, passes, prefix tree. Works without a network."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from trainer_rank.cli.plan_display import at, highest, kinds, shares
from trainer_rank.errors import ConfigError
from trainer_rank.planning.report import PlanReport, Tree
from trainer_rank.units import GIB, format_bytes

_COLOURS: Final = ("#8a8f98", "#2f6fb0", "#a0509c", "#c8503c", "#2a9d8f", "#6aa84f", "#d9a514")
_INK: Final = "#22272e"
_MOST_PASSES: Final = 60
_MOST_SEGMENTS: Final = 1500

_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #22272e; background: #fff; max-width: 1080px; margin: 2rem auto;
  padding: 0 1rem; }}
h1 {{ font-size: 1.45rem; margin: 0 0 .3rem; }} h2 {{ font-size: 1.05rem; margin: 2rem 0 .3rem; }}
p.note {{ color: #57606a; margin: .2rem 0 .6rem; }}
.fits {{ color: #1a7f37; }} .short {{ color: #b3261e; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .2rem .9rem .2rem 0; text-align: right; border-bottom: 1px solid #e4e7eb; }}
th:first-child, td:first-child {{ text-align: left; }} th {{ font-weight: 600; color: #57606a; }}
.swatch {{ display: inline-block; width: .8em; height: .8em; margin-right: .5em; border-radius: 2px; }}
.chart {{ width: 100%; }}
</style><script>{plotly}</script></head><body>
{body}
<script type="application/json" id="plan">{data}</script>
<script>{draw}</script>
</body></html>
"""


def write_page(report: PlanReport, path: Path) -> None:
    """Write the page of a plan.

    Raises:
        ConfigError: plotly is not installed, or the file cannot be written.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--html needs the package 'plotly', which is not installed; run: pip install \"trainer-rank[cli]\""
        ) from error
    charts = [
        ("capacity", 170, _capacity(report)),
        ("timeline", 420, _timeline(report)),
        ("passes", 340, _passes(report)),
        ("tree", 420, _tree(report.tree)),
    ]
    drawn = [(name, height, chart) for name, height, chart in charts if chart is not None]
    draw = "".join(
        f"Plotly.newPlot({json.dumps(name)},{_script(traces)},{_script(_layout(layout, height))},"
        "{responsive:true,displaylogo:false});"
        for name, height, (traces, layout) in drawn
    )
    page = _PAGE.format(
        title=html.escape(f"{report.model} on {report.device}"),
        plotly=get_plotlyjs(),
        body=_body(report, {name for name, _, _ in drawn}),
        data=_script(report.as_json()),
        draw=draw,
    )
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path} cannot be written ({error.strerror}); name another file") from error


def _script(value: Any) -> str:
    """Return JSON that may stand inside a script element."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")


def _layout(own: dict[str, Any], height: int) -> dict[str, Any]:
    common = {
        "height": height, "margin": {"l": 70, "r": 20, "t": 30, "b": 50}, "paper_bgcolor": "#fff",
        "plot_bgcolor": "#fff", "font": {"family": "system-ui, sans-serif", "size": 13, "color": _INK},
        "legend": {"orientation": "h", "y": -0.25, "x": 0, "traceorder": "normal"}, "hoverlabel": {"align": "left"},
    }  # fmt: skip
    return {**common, **own}


def _body(report: PlanReport, charts: set[str]) -> str:
    peak = f"{format_bytes(report.peak_bytes)} of {format_bytes(report.capacity_bytes)}"
    if report.fits:
        count = len(report.passes)
        verdict = f'<span class="fits">fits</span> in {count} pass{"" if count == 1 else "es"}, peak {peak}'
    else:
        verdict = f'<span class="short">does not fit</span>, {format_bytes(report.short_bytes)} short'
    parts = [
        f"<h1>{html.escape(report.model)} on {html.escape(report.device)}: {verdict}</h1>",
        f'<p class="note">{html.escape(_options(report))}</p>',
    ]
    if report.data_set is not None:
        data = report.data_set
        parts.append(
            f"<p>{data.requests:,} requests in {data.groups:,} groups, {data.groups_per_step:,} a step; no pass of any "
            f"order takes more than {format_bytes(data.worst_bytes)}. Below is the heaviest step.</p>"
        )
    if report.refusal is not None:
        parts.append(f"<p>{html.escape(report.refusal)}</p>")
    if report.fixes:
        rows = [
            (fix.change, f"{format_bytes(fix.before_bytes)} → {format_bytes(fix.after_bytes)}", str(fix.passes))
            for fix in report.fixes
        ]
        parts.append("<h2>What makes it fit</h2>" + _table(("change", "device holds at the peak", "passes"), rows))
    parts.append("<h2>The device at the peak</h2>" + _chart("capacity") + _shares(report))
    if "timeline" in charts:
        parts.append(
            "<h2>Memory over the step</h2>"
            f'<p class="note">{html.escape(_timeline_note(report))}</p>' + _chart("timeline") + _phases(report)
        )
    if "passes" in charts:
        shown, total = min(len(report.passes), _MOST_PASSES), len(report.passes)
        note = "" if shown == total else f'<p class="note">The first {shown} of {total} passes.</p>'
        parts.append(f"<h2>Passes</h2>{note}" + _chart("passes"))
    if "tree" in charts:
        assert report.tree is not None, "its chart was drawn"
        shown, total = min(len(report.tree.rows), _MOST_SEGMENTS), len(report.tree.rows)
        more = "" if shown == total else f" The first {shown:,} of {total:,} segments."
        parts.append(
            '<h2>Prefix tree of the worst pass</h2><p class="note">A box is a run of tokens that is computed once for '
            f"everything below it; its width is the packed rows of the box and all below.{more}</p>" + _chart("tree")
        )
    return "\n".join(parts)


def _options(report: PlanReport) -> str:
    options = report.options
    rank = options["lora_rank"]
    trained = "all weights" if rank is None else f"adapters of rank {rank}"
    return (
        f"{trained}, {options['dtype']}, recompute {options['recompute']}, head in chunks of "
        f"{options['head_chunk_rows']:,} rows, caller {options['caller_bytes_per_token']} bytes per token"
    )


def _chart(name: str) -> str:
    return f'<div id="{name}" class="chart"></div>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, raw_first: bool = False) -> str:
    lines = ["<table><tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in head) + "</tr>"]
    for row in rows:
        cells = [cell if raw_first and not place else html.escape(cell) for place, cell in enumerate(row)]
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return "".join(lines) + "</table>"


def _shares(report: PlanReport) -> str:
    rows = [
        (f'<span class="swatch" style="background:{_COLOURS[kind]}"></span>{html.escape(name)}', format_bytes(share),
         f"{share / report.capacity_bytes:.1%}")
        for kind, name, share in shares(report)
    ]  # fmt: skip
    return _table(("", "bytes", "of the device"), rows, raw_first=True)


def _phases(report: PlanReport) -> str:
    rows = [
        (at(one.phase, one.layer), format_bytes(one.peak_bytes), format_bytes(report.base_bytes + one.peak_bytes))
        for one in highest(report)
    ]
    return _table(("phase of the worst pass", "peak of the pass", "device holds"), rows)


def _capacity(report: PlanReport) -> tuple[list[Any], dict[str, Any]]:
    traces = [
        {"type": "bar", "orientation": "h", "name": name, "y": [""], "x": [share / GIB],
         "marker": {"color": colour}, "hovertemplate": f"{name}<br>{format_bytes(share)}<extra></extra>"}
        for (name, _, share), colour in zip(kinds(report), _COLOURS, strict=True) if share
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


def _timeline_note(report: PlanReport) -> str:
    passes = len(report.passes)
    one = "The worst pass" if passes != 1 else "The pass"
    more = f"; the other {passes - 1} passes of the step need no more" if passes > 1 else ""
    return f"{one}, from first to last layer and back{more}. Dashed: what the device has."


def _timeline(report: PlanReport) -> tuple[list[Any], dict[str, Any]] | None:
    if not report.timeline:
        return None
    base = report.base_bytes
    labels = [f"{number + 1} {at(one.phase, one.layer)}" for number, one in enumerate(report.timeline)]
    places = list(range(len(labels)))
    peaks = [(base + one.peak_bytes) / GIB for one in report.timeline]
    ends = [(base + one.end_bytes) / GIB for one in report.timeline]
    flat = [("outside torch", 0), ("weights", 1), ("gradients", 2), ("optimizer state", 3)]
    worst = set(report.worst.terms) if report.worst is not None else set()
    standing = {index: sum(share for kind, name, share in shares(report) if kind == index and name not in worst)
                for _, index in flat}  # fmt: skip
    traces: list[Any] = [
        {"type": "scatter", "mode": "lines", "name": name, "stackgroup": "standing", "x": places,
         "y": [standing[index] / GIB] * len(places), "line": {"width": 0}, "fillcolor": _COLOURS[index],
         "hovertemplate": f"{name} {format_bytes(standing[index])}<extra></extra>"}
        for name, index in flat if standing[index]
    ]  # fmt: skip
    traces += [
        {"type": "bar", "name": "peak of the pass", "x": places, "base": base / GIB, "width": 0.75,
         "y": [peak - base / GIB for peak in peaks], "marker": {"color": _COLOURS[5]},
         "customdata": [[label.partition(" ")[2], format_bytes(int(peak * GIB))]
                        for label, peak in zip(labels, peaks, strict=True)],
         "hovertemplate": "%{customdata[0]}<br>device holds %{customdata[1]}<extra></extra>"},
        {"type": "scatter", "mode": "lines+markers", "name": "left at its end", "x": places, "y": ends,
         "line": {"color": _INK, "width": 2, "shape": "hvh"}, "marker": {"size": 5},
         "hovertemplate": "%{y:.2f} GiB left<extra></extra>"},
    ]  # fmt: skip
    top = max(*peaks, report.peak_bytes / GIB)
    capacity = report.capacity_bytes / GIB
    # A device far larger than the step would flatten the chart; its line is then left out and named instead.
    near = capacity <= 2.5 * top
    note = [] if near else [
        {"xref": "paper", "yref": "paper", "x": 1, "y": 1.06, "showarrow": False,
         "text": f"the device has {format_bytes(report.capacity_bytes)}, above this chart"}
    ]  # fmt: skip
    return traces, {
        "xaxis": {"tickvals": places, "ticktext": [label.partition(" ")[2] for label in labels], "tickangle": -35},
        "yaxis": {"title": {"text": "GiB on the device"}, "gridcolor": "#e4e7eb",
                  "range": [0, (max(capacity, top) if near else top) * 1.08]},
        "shapes": [_limit("y", capacity)] if near else [], "annotations": note, "bargap": 0.2,
        "margin": {"l": 70, "r": 20, "t": 30, "b": 110}, "legend": {"orientation": "h", "y": -0.45, "x": 0},
    }  # fmt: skip


def _passes(report: PlanReport) -> tuple[list[Any], dict[str, Any]] | None:
    shown = report.passes[:_MOST_PASSES]
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
    traces = [
        {"type": "bar", "name": name, "x": numbers, "y": [one.terms.get(name, 0) / GIB for one in shown],
         "marker": {"color": palette[place % len(palette)]}, "customdata": hover,
         "hovertemplate": f"{name} %{{y:.3f}} GiB<br>%{{customdata}}<extra>pass %{{x}}</extra>"}
        for place, name in enumerate(names)
    ]  # fmt: skip
    return traces, {
        "barmode": "stack", "xaxis": {"title": {"text": "pass"}, "type": "category"},
        "yaxis": {"title": {"text": "GiB above what is resident"}, "gridcolor": "#e4e7eb"},
        "bargap": 0.3 if len(shown) > 4 else 0.8,
    }  # fmt: skip


def _tree(tree: Tree | None) -> tuple[list[Any], dict[str, Any]] | None:
    if tree is None or not tree.rows:
        return None
    parents, rows, ends = tree.parent[:_MOST_SEGMENTS], tree.rows[:_MOST_SEGMENTS], tree.ends[:_MOST_SEGMENTS]
    roots = sum(parent < 0 for parent in parents)
    # One box around several roots, so that the chart has one whole.
    around = [] if roots == 1 else ["all"]
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
        "hovertemplate": "%{customdata}<extra></extra>", "marker": {"colorscale": "Teal"}, "root": {"color": "#e4e7eb"},
    }  # fmt: skip
    return [trace], {"margin": {"l": 20, "r": 20, "t": 10, "b": 10}}
