"""A plan as one self-contained page: memory over the step, passes, prefix tree. Works without a network."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from trainer_rank.cli.plan_charts import COLOURS, MOST_PASSES, MOST_SEGMENTS, capacity, passes, prefix_tree, timeline
from trainer_rank.cli.plan_display import at, highest, shares
from trainer_rank.errors import ConfigError
from trainer_rank.planning.report import PlanReport
from trainer_rank.units import format_bytes

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
        ("capacity", 170, capacity(report)),
        ("timeline", 420, timeline(report)),
        ("passes", 340, passes(report)),
        ("tree", 320, prefix_tree(report.tree)),
    ]
    drawn = [(name, height, chart) for name, height, chart in charts if chart is not None]
    draw = "".join(
        f"Plotly.newPlot({json.dumps(name)},{_script(traces)},{_script(_layout(layout, height))},"
        "{responsive:true,displayModeBar:false});"
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
        "plot_bgcolor": "#fff", "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#22272e"},
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
            "<h2>Memory over the worst pass</h2>"
            f'<p class="note">{html.escape(_timeline_note(report))}</p>' + _chart("timeline") + _phases(report)
        )
    if "passes" in charts:
        shown, total = min(len(report.passes), MOST_PASSES), len(report.passes)
        note = "" if shown == total else f'<p class="note">The first {shown} of {total} passes.</p>'
        parts.append(f"<h2>Memory over the step, pass by pass</h2>{note}" + _chart("passes"))
    if "tree" in charts:
        assert report.tree is not None, "its chart was drawn"
        shown, total = min(len(report.tree.rows), MOST_SEGMENTS), len(report.tree.rows)
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
        (f'<span class="swatch" style="background:{COLOURS[kind]}"></span>{html.escape(name)}', format_bytes(share),
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


def _timeline_note(report: PlanReport) -> str:
    passes = len(report.passes)
    one = "The worst pass" if passes != 1 else "The pass"
    more = f"; the other {passes - 1} passes of the step need no more" if passes > 1 else ""
    return f"{one}, from first to last layer and back{more}. Dashed: what the device has."
