"""What ``trainer-rank data check`` prints: faults, figures and a table of lengths; or one JSON document."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Final

import typer
from rich.console import Console
from rich.table import Table

from trainer_rank.training.data_check import DataReport
from trainer_rank.training.data_summary import DataSummary, NearPrefix

Decode = Callable[[Sequence[int]], str]

_BAR: Final = 40
_MOST_LINES: Final = 10


def print_json(report: DataReport, decode: Decode | None) -> None:
    """Print the report as one JSON document; with a tokenizer, near prefixes also as text."""
    summary = None
    if report.summary is not None:
        figures = report.summary
        summary = {
            **asdict(figures),
            "sharing_ratio": figures.sharing_ratio,
            "sharing_ratio_by_group": figures.sharing_ratio_by_group,
            "near_prefixes": [{**asdict(one), **_decoded(one, decode)} for one in figures.near_prefixes],
        }
    faults = [{"line": one.line, "column": one.column, "message": str(one)} for one in report.faults]
    document = {"file": str(report.path), "num_faults": report.num_faults, "faults": faults, "summary": summary}
    typer.echo(json.dumps(document, allow_nan=False))


def print_text(report: DataReport, decode: Decode | None, console: Console | None = None) -> None:
    """Print faults first, then the figures of the lines that have none."""
    out = console if console is not None else Console(highlight=False)

    def say(line: str) -> None:
        out.print(line, markup=False, soft_wrap=True)

    for fault in report.faults:
        say(str(fault))
    rest = report.num_faults - len(report.faults)
    if rest:
        say(f"... and {rest:,} more lines with faults; --limit-errors {report.num_faults} lists them all")
    if report.num_faults:
        say(f"{report.num_faults:,} {'fault' if report.num_faults == 1 else 'faults'}")
    if report.summary is None:
        return
    if report.num_faults:
        say("\nthe lines without a fault:")
    for name, value in _figures(report.summary):
        say(f"{name:<22} {value}")
    out.print(_lengths(report.summary))
    if report.summary.num_near_prefixes:
        say(
            f"{report.summary.num_near_prefixes:,} pairs of lines part over a few tokens and then agree again; "
            f"the worst {len(report.summary.near_prefixes)}:"
        )
    for one in report.summary.near_prefixes:
        say(f"  lines {one.line_a} and {one.line_b} part at token {one.position}; {one.lost_rows:,} rows not shared")
        texts = _decoded(one, decode)
        say(f"    both      ... {texts['before_text']!r}" if texts else f"    both      ... {list(one.before)}")
        for line, key, ids in ((one.line_a, "after_a_text", one.after_a), (one.line_b, "after_b_text", one.after_b)):
            say(f"    line {line:<6} {texts[key]!r} ..." if texts else f"    line {line:<6} {list(ids)} ...")
    if not report.num_faults:
        say(f"{report.path}: every line can be trained")


def _figures(summary: DataSummary) -> list[tuple[str, str]]:
    duplicates = [f"{line} (as {earlier})" for line, earlier in summary.duplicates]
    nothing = [str(line) for line in summary.trains_nothing]
    return [
        ("requests", f"{summary.requests:,} in {summary.groups:,} groups"),
        (
            "length in tokens",
            f"min {summary.min_length:,}, median {summary.median_length:,}, p99 {summary.p99_length:,}, "
            f"max {summary.max_length:,}",
        ),
        ("logical tokens", f"{summary.logical_tokens:,}"),
        ("packed, all together", f"{summary.packed_rows:,} rows, sharing ratio {summary.sharing_ratio:.2f}"),
        (
            "packed, by group",
            f"{summary.packed_rows_by_group:,} rows, sharing ratio {summary.sharing_ratio_by_group:.2f}",
        ),
        ("trained tokens", f"{summary.trained_tokens:,}"),
        ("lines without training", _lines(nothing)),
        ("exact duplicates", _lines(duplicates)),
    ]


def _lines(lines: list[str]) -> str:
    if not lines:
        return "none"
    shown = ", ".join(lines[:_MOST_LINES]) + (", ..." if len(lines) > _MOST_LINES else "")
    return f"{len(lines):,}: {'line' if len(lines) == 1 else 'lines'} {shown}"


def _lengths(summary: DataSummary) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("tokens", "requests", "of all tokens"):
        table.add_column(name, justify="right")
    table.add_column("")
    most = max(one.requests for one in summary.lengths)
    for one in summary.lengths:
        bar = "█" * max(round(_BAR * one.requests / most), bool(one.requests))
        share = f"{100 * one.tokens / summary.logical_tokens:.1f} %"
        span = f"{one.start:,}" if one.stop == one.start + 1 else f"{one.start:,} to {one.stop - 1:,}"
        table.add_row(span, f"{one.requests:,}", share, bar)
    return table


def _decoded(one: NearPrefix, decode: Decode | None) -> dict[str, str]:
    if decode is None:
        return {}
    return {f"{name}_text": decode(getattr(one, name)) for name in ("before", "after_a", "after_b")}
