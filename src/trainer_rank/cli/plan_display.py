"""A plan as text for people, or as JSON."""

from __future__ import annotations

import json
from typing import Final

import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from trainer_rank.planning.report import DataSetReport, Instant, PlanReport
from trainer_rank.units import format_bytes

_SHOWN_PASSES: Final = 8
_WIDEST_BAR: Final = 98

# One colour and, for terminals without colours, one letter per kind of memory.
_KINDS: Final = (
    ("outside torch", "grey50", "#"),
    ("weights", "blue", "W"),
    ("gradients", "magenta", "G"),
    ("optimizer state", "red", "O"),
    ("kept for backward", "cyan", "K"),
    ("at work", "green", "A"),
    ("caller's loss", "yellow", "C"),
)
_KIND_OF: Final = {
    "CUDA context": 0,
    "library workspace": 0,
    "weights": 1,
    "allocator's rounding": 1,
    "gradients": 2,
    "gradients to come": 2,
    "optimizer state to come": 3,
    "checkpointed inputs": 4,
    "activations": 4,
    "other passes kept alive": 4,
    "caller's loss": 6,
}
_AT_WORK: Final = 5


def print_json(report: PlanReport) -> None:
    """Print one JSON document."""
    typer.echo(json.dumps(report.as_json(), allow_nan=False))


def print_text(report: PlanReport, *, all_passes: bool, console: Console | None = None) -> None:
    """Print verdict, bar, terms, phases, passes and, when it does not fit, what would."""
    console = console if console is not None else Console(highlight=False)
    console.print(_verdict(report), soft_wrap=True)
    if report.data_set is not None:
        console.print(_data_set(report.data_set, report), soft_wrap=True)
    console.print(_bar(report, max(20, min(console.width, _WIDEST_BAR) - 2)))
    console.print(_terms(report))
    if report.timeline:
        console.print(_phases(report))
    if report.passes:
        console.print(_passes(report, all_passes=all_passes))
    if report.refusal is not None:
        console.print(Text(report.refusal), soft_wrap=True)
        console.print(_fixes(report))


def shares(report: PlanReport) -> list[tuple[int, str, int]]:
    """Return what the device holds at the worst peak: number of its kind, name and bytes, kind by kind."""
    at_peak = report.worst.terms.items() if report.worst is not None else ()
    every = [*report.resident.items(), *report.pending.items(), *at_peak]
    return sorted(((_KIND_OF.get(name, _AT_WORK), name, share) for name, share in every if share), key=lambda x: x[0])


def kinds(report: PlanReport) -> list[tuple[str, str, int]]:
    """Return name, colour and bytes of each kind of memory at the worst peak."""
    totals = [0] * len(_KINDS)
    for kind, _, share in shares(report):
        totals[kind] += share
    return [(name, colour, total) for (name, colour, _), total in zip(_KINDS, totals, strict=True)]


def at(phase: str, layer: int | None) -> str:
    """Return where a peak falls, in words."""
    return phase if layer is None else f"{phase}, layer {layer}"


def _verdict(report: PlanReport) -> Text:
    if report.fits:
        count = len(report.passes)
        where = "" if report.worst is None else f", in {report.worst.phase}"
        what = "the heaviest step" if report.data_set is not None else report.model
        words = (
            f"fits: {what} on {report.device} in {count} pass{'' if count == 1 else 'es'}, peak "
            f"{format_bytes(report.peak_bytes)} of {format_bytes(report.capacity_bytes)}{where}"
        )
        return Text(words, style="bold green")
    short = f", {format_bytes(report.short_bytes)} short" if report.short_bytes else ""
    return Text(f"does not fit: {report.model} on {report.device}{short}", style="bold red")


def _data_set(data: DataSetReport, report: PlanReport) -> Text:
    lines = [
        f"{data.requests:,} requests in {data.groups:,} groups, {data.groups_per_step:,} groups a step; "
        f"longest request {data.longest_request:,} tokens"
    ]
    if data.refused:
        count = len(data.refused)
        named = ", ".join(f"{one.name} ({one.tokens:,} tokens)" for one in data.refused[:4])
        more = f" and {count - 4} other kinds" if count > 4 else ""
        lines.append(f"cannot fit alone, so some step would stop: {named}{more}")
    elif report.fits and data.worst_by == "sizes":
        lines.append(f"no step, in whatever order groups are drawn, takes more than {format_bytes(data.worst_bytes)}")
    elif report.fits:
        lines.append(
            f"every request fits alone, so every step fits in some number of passes; none takes more than "
            f"{format_bytes(data.worst_bytes)}"
        )
    if report.fits and data.groups_per_step < data.groups:
        lines.append(f"shown is the heaviest step, groups {', '.join(map(str, data.heaviest_step[:8]))}"
                     f"{' ...' if len(data.heaviest_step) > 8 else ''}")  # fmt: skip
    return Text("\n".join(lines))


def _bar(report: PlanReport, width: int) -> Text:
    """Return a bar of the device's capacity; what exceeds it is cut off, as it would be, and marked."""
    bar, drawn, before = Text("|"), 0, 0
    for (_, colour, share), (_, _, letter) in zip(kinds(report), _KINDS, strict=True):
        before += share
        end = min(width, round(width * before / report.capacity_bytes))
        bar.append(letter * (end - drawn), style=f"{colour} reverse")
        drawn = max(drawn, end)
    bar.append("." * (width - drawn), style="grey50")
    bar.append(">" if before > report.capacity_bytes else "|", style="bold red" if drawn == width else "")
    return bar


def _terms(report: PlanReport) -> Table:
    table = Table("", "at the peak", box=None, pad_edge=False)
    table.add_column("bytes", justify="right")
    table.add_column("share", justify="right")
    for kind, name, share in shares(report):
        _, colour, letter = _KINDS[kind]
        table.add_row(Text(letter, style=f"{colour} reverse"), name, format_bytes(share),
                      f"{share / report.capacity_bytes:.1%}")  # fmt: skip
    reserve = report.reserve_bytes
    free = report.capacity_bytes - reserve - sum(share for _, _, share in shares(report))
    for name, share in (("reserve, kept free", reserve), ("free", free)):
        if report.fits or share > 0:
            table.add_row(".", name, format_bytes(share), f"{share / report.capacity_bytes:.1%}")
    return table


def highest(report: PlanReport) -> list[Instant]:
    """Return the highest instant of each phase of the worst pass, in the order the phases begin."""
    found: dict[str, Instant] = {}
    for instant in report.timeline:
        if instant.phase not in found or instant.peak_bytes > found[instant.phase].peak_bytes:
            found[instant.phase] = instant
    return list(found.values())


def _phases(report: PlanReport) -> Table:
    table = Table("phase", "highest at", box=None, pad_edge=False)
    for name in ("the worst pass", "device holds", "of the device"):
        table.add_column(name, justify="right")
    top = max(instant.peak_bytes for instant in report.timeline)
    for instant in highest(report):
        holds = report.base_bytes + instant.peak_bytes
        table.add_row(
            instant.phase, "" if instant.layer is None else f"layer {instant.layer}", format_bytes(instant.peak_bytes),
            format_bytes(holds), f"{holds / report.capacity_bytes:.1%}",
            style="bold" if instant.peak_bytes == top else None,
        )  # fmt: skip
    return table


def _passes(report: PlanReport, *, all_passes: bool) -> Table | Group:
    table = Table(box=None, pad_edge=False)
    for name in ("pass", "requests", "packed", "logical", "sharing", "head rows", "needs"):
        table.add_column(name, justify="right")
    table.add_column("peak in")
    shown = report.passes if all_passes else report.passes[:_SHOWN_PASSES]
    for number, one in enumerate(shown, start=1):
        sharing = one.logical_tokens / one.packed_rows if one.packed_rows else 1.0
        table.add_row(str(number), str(one.requests), f"{one.packed_rows:,}", f"{one.logical_tokens:,}",
                      f"{sharing:.2f}", f"{one.head_rows:,}", format_bytes(one.required_bytes), one.phase)  # fmt: skip
    hidden = len(report.passes) - len(shown)
    if not hidden:
        return table
    return Group(table, Text(f"{len(shown)} of {len(report.passes)} passes shown; --all-passes lists them"))


def _fixes(report: PlanReport) -> Table | Text:
    if not report.fixes:
        return Text("No single option and no known GPU makes it fit; shorten the longest request.")
    table = Table("what makes it fit (each priced)", box=None, pad_edge=False)
    table.add_column("device holds at the peak")
    table.add_column("passes", justify="right")
    for fix in report.fixes:
        table.add_row(fix.change, f"{format_bytes(fix.before_bytes)} -> {format_bytes(fix.after_bytes)}",
                      str(fix.passes))  # fmt: skip
    return table
