"""A plan as text for people, or as JSON."""

from __future__ import annotations

import json
from typing import Final

import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from trainer_rank.planning.report import PlanReport
from trainer_rank.units import format_bytes

_SHOWN_PASSES: Final = 8
_COLOURS: Final = ("grey50", "blue", "grey35", "grey35", "magenta", "cyan", "green", "yellow", "red", "bright_blue")


def print_json(report: PlanReport) -> None:
    """Print one JSON document."""
    typer.echo(json.dumps(report.as_json(), allow_nan=False))


def print_text(report: PlanReport, *, all_passes: bool) -> None:
    """Print verdict, bar, terms, passes and, when it does not fit, what would."""
    console = Console()
    console.print(_verdict(report))
    shares = _shares(report)
    console.print(_bar(shares, report.capacity_bytes, max(20, min(console.width, 100) - 2)))
    console.print(_terms(shares, report))
    if report.passes:
        console.print(_passes(report, all_passes=all_passes))
    if report.refusal is not None:
        console.print(Text(report.refusal))
        console.print(_fixes(report))


def _verdict(report: PlanReport) -> Text:
    if report.worst is not None:
        count = len(report.passes)
        words = (
            f"fits: {report.model} on {report.device} in {count} pass{'es' if count > 1 else ''}, peak "
            f"{format_bytes(report.peak_bytes)} of {format_bytes(report.capacity_bytes)}, in {report.worst.phase}"
        )
        return Text(words, style="bold green")
    words = f"does not fit: {report.model} on {report.device}, {format_bytes(report.short_bytes)} short"
    return Text(words, style="bold red")


def _shares(report: PlanReport) -> list[tuple[str, int]]:
    """Return what the device holds at the peak of the worst pass, by name."""
    worst = report.worst
    at_peak = list(worst.terms.items()) if worst is not None else []
    return [*report.resident.items(), *report.pending.items(), *at_peak]


def _bar(shares: list[tuple[str, int]], capacity: int, width: int) -> Text:
    """Return a bar of the device's capacity; what exceeds it is cut off, as it would be."""
    bar, drawn, before = Text(), 0, 0
    for number, (_, share) in enumerate(shares):
        before += share
        end = min(width, round(width * before / capacity))
        bar.append("█" * (end - drawn), style=_COLOURS[number % len(_COLOURS)])
        drawn = max(drawn, end)
    bar.append("░" * (width - drawn), style="grey23")
    return bar


def _terms(shares: list[tuple[str, int]], report: PlanReport) -> Table:
    table = Table("", "at the peak", "bytes", "share", box=None, pad_edge=False)
    for number, (name, share) in enumerate(shares):
        table.add_row(Text("█", style=_COLOURS[number % len(_COLOURS)]), name, format_bytes(share),
                      f"{share / report.capacity_bytes:.1%}")  # fmt: skip
    free = report.capacity_bytes - sum(share for _, share in shares)
    if report.fits:
        table.add_row("░", "free", format_bytes(free), f"{free / report.capacity_bytes:.1%}")
    return table


def _passes(report: PlanReport, *, all_passes: bool) -> Table | Group:
    table = Table("pass", "requests", "packed", "logical", "sharing", "head rows", "needs", "peak in", box=None)
    shown = report.passes if all_passes else report.passes[:_SHOWN_PASSES]
    for number, one in enumerate(shown, start=1):
        sharing = one.logical_tokens / one.packed_rows if one.packed_rows else 1.0
        table.add_row(str(number), str(one.requests), f"{one.packed_rows:,}", f"{one.logical_tokens:,}",
                      f"{sharing:.2f}", f"{one.head_rows:,}", format_bytes(one.required_bytes), one.phase)  # fmt: skip
    hidden = len(report.passes) - len(shown)
    return Group(table, Text(f"{hidden} more passes; --all-passes lists them")) if hidden else table


def _fixes(report: PlanReport) -> Table | Text:
    if not report.fixes:
        return Text("No single option and no known GPU makes it fit; shorten the longest request.")
    table = Table("what makes it fit (priced)", "device holds", "", "passes", box=None, pad_edge=False)
    for fix in report.fixes:
        table.add_row(
            fix.change, format_bytes(fix.before_bytes), f"-> {format_bytes(fix.after_bytes)}", str(fix.passes)
        )
    return table
