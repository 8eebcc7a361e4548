"""``trainer-rank profile``: what observed passes taught, kept from one run to the next."""

from __future__ import annotations

import json as json_format
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainer_rank.cli.examples import epilog
from trainer_rank.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from trainer_rank.planner.speed import Speed
    from trainer_rank.store import Entry

profile = typer.Typer(help="What observed passes taught of memory.", no_args_is_help=True, rich_markup_mode=None)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Environment = Annotated[str, typer.Argument(help="Digest from `profile ls`, or its first characters.")]


@profile.command("ls", short_help="List what is known, by model and device.", epilog=epilog("profile ls"))
def ls(json: Json = False, debug: Debug = False) -> None:
    """List the models, devices and versions something is known of."""
    from rich.console import Console
    from rich.table import Column, Table

    from trainer_rank.store import LearnedStore

    store = LearnedStore()
    grouped = _grouped(store.entries())
    if json:
        rows = [
            {"environment": digest, "facts": dict(of[0].facts), "signatures": len(of),
             "observations": sum(one.observations for one in of), "written_at": max(one.written_at for one in of)}
            for digest, of in grouped.items()
        ]  # fmt: skip
        typer.echo(json_format.dumps({"path": str(store.path), "environments": rows}))
        return
    if not grouped:
        typer.echo(f"nothing is known yet; training runs write to {store.path}")
        return
    # The digest is what the other commands are given, so it is never cut.
    table = Table(Column("environment", no_wrap=True, min_width=16), "model", "device", "seen", "written")
    for digest, of in grouped.items():
        facts, signatures = of[0].facts, len(of)
        table.add_row(
            digest, _model(facts), f"{facts.get('device')}, torch {facts.get('versions', {}).get('torch')}",
            f"{sum(one.observations for one in of)} in {signatures} {'signature' if signatures == 1 else 'signatures'}",
            _when(max(one.written_at for one in of)),
        )  # fmt: skip
    Console(highlight=False).print(table)


@profile.command("show", short_help="Show what is known of one model and device.", epilog=epilog("profile show"))
def show(environment: Environment, json: Json = False, debug: Debug = False) -> None:
    """Show every signature of ENVIRONMENT and what it adds to a price."""
    from rich.console import Console
    from rich.table import Table

    found = _find(environment)
    if json:
        typer.echo(json_format.dumps([one.to_json() for one in found]))
        return
    out = Console(highlight=False)
    facts = found[0].facts
    versions = ", ".join(f"{name} {value}" for name, value in facts.get("versions", {}).items())
    out.print(f"{_model(facts)} on {facts.get('device')}; {versions}", markup=False, soft_wrap=True)
    table = Table("pricer", "signature", "observations", "what is learned")
    for one in found:
        table.add_row(one.pricer, _readable(one.signature), str(one.observations), _meaning(one))
    out.print(table)


@profile.command("export", short_help="Write what is known to a file.", epilog=epilog("profile export"))
def export(
    file: Annotated[Path, typer.Argument(help="JSON file to write.")],
    environment: Annotated[str | None, typer.Option(help="Only this one, from `profile ls`.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Write what is known to FILE, for `profile import` on another machine of the same kind."""
    from trainer_rank.store import LearnedStore

    found = LearnedStore().entries() if environment is None else _find(environment)
    document = {"schema": 1, "entries": [one.to_json() for one in found]}
    try:
        with file.open("w" if force else "x", encoding="utf-8") as stream:
            json_format.dump(document, stream, indent=1)
    except FileExistsError as error:
        raise ConfigError(f"{file} is there already; name another, or give --force to overwrite it") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be written ({error.strerror}); name another") from error
    typer.echo(f"{len(found)} {'entry' if len(found) == 1 else 'entries'} written to {file}")


@profile.command("import", short_help="Add what another store knows.", epilog=epilog("profile import"))
def import_(
    file: Annotated[Path, typer.Argument(help="JSON file from `profile export`.")], debug: Debug = False
) -> None:
    """Put what FILE holds together with what is known; nothing is lost on either side."""
    from trainer_rank.store import Entry, LearnedStore

    try:
        document = json_format.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} must be a file from `trainer-rank profile export` ({error})") from error
    if not isinstance(document, dict) or document.get("schema") != 1 or not isinstance(document.get("entries"), list):
        raise ConfigError(
            f"{file} must hold schema 1 and a list of entries; write it with `trainer-rank profile export`"
        )
    try:
        entries = [Entry.from_json(one) for one in document["entries"]]
    except StoreError as error:
        raise ConfigError(f"{file}: {error}") from error
    store = LearnedStore()
    store.add(entries)
    typer.echo(f"{len(entries)} {'entry' if len(entries) == 1 else 'entries'} added to {store.path}")


@profile.command("forget", short_help="Delete what is known of one model and device.", epilog=epilog("profile forget"))
def forget(environment: Environment, debug: Debug = False) -> None:
    """Delete everything known of ENVIRONMENT; it is learned again."""
    from trainer_rank.store import LearnedStore

    digest = _find(environment)[0].environment
    count = LearnedStore().forget(digest)
    typer.echo(f"{count} {'entry' if count == 1 else 'entries'} of {digest} deleted")


@profile.command("fit-speed", short_help="Measure how long passes take.", epilog=epilog("profile fit-speed"))
def fit_speed(
    source: Annotated[Path, typer.Argument(help="Run folder, or a configuration to measure with now.")],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Fit the predicted time of passes to those of a recorded run, or to passes run now; later runs plan with it."""
    from rich.console import Console

    from trainer_rank.planner.speed import fit_speed as fit
    from trainer_rank.store import SPEED, LearnedStore
    from trainer_rank.training.fit_speed import measured_passes, recorded_passes

    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")
    progress = Console(stderr=True, highlight=False)
    if source.is_dir():
        environment, passes = recorded_passes(source)
    elif source.is_file():
        environment, passes = measured_passes(source, tell=progress.print)
    else:
        raise ConfigError(f"fit-speed: {source} must be a run folder or a configuration file; there is neither")
    found = fit(passes)
    store = LearnedStore()
    store.merge(environment, SPEED, {"": found.to_json()})
    if json:
        typer.echo(json_format.dumps({"passes": len(passes), **found.to_json()}))
        return
    typer.echo(f"{len(passes)} passes: {_speed(found)}; median error {found.error:.1%}")
    typer.echo(f"runs that begin from now on plan with it ({store.path})")


def _grouped(entries: list[Entry]) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for one in entries:
        found.setdefault(one.environment, []).append(one)
    return found


def _find(environment: str) -> list[Entry]:
    """Return the entries of the one environment whose digest begins so."""
    from trainer_rank.store import LearnedStore

    store = LearnedStore()
    grouped = _grouped(store.entries())
    matching = [digest for digest in grouped if digest.startswith(environment)]
    if len(matching) != 1:
        known = ", ".join(grouped) or "none"
        many = "several do" if matching else "none does"
        raise ConfigError(
            f"environment must begin one digest in {store.path}, got {environment!r} and {many} (known: {known}); see "
            "`trainer-rank profile ls`"
        )
    return grouped[matching[0]]


def _model(facts: Any) -> str:
    model = facts.get("model", {})
    return f"{model.get('family')}, {model.get('layers')} layers of {model.get('hidden_size')}, {model.get('dtype')}"


def _when(written_at: float) -> str:
    from datetime import datetime

    return datetime.fromtimestamp(written_at).strftime("%Y-%m-%d %H:%M")


def _readable(signature: str) -> str:
    return ", ".join(f"{name} {_plain(value)}" for name, value in json_format.loads(signature or "{}").items())


def _plain(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _speed(speed: Speed) -> str:
    return (
        f"{1000 * (speed.seconds_per_row or 0):.3f} ms per row, a pass counts for {speed.pass_rows} rows more, a "
        f"segment for {speed.segment_rows}, recomputing a layer for {speed.again:.2f} forwards of it"
    )


def _meaning(entry: Entry) -> str:
    from trainer_rank.memory import Profile, Residual
    from trainer_rank.planner.speed import Speed
    from trainer_rank.store import SPEED
    from trainer_rank.units import format_bytes

    if entry.pricer == SPEED:
        return _speed(Speed.from_json(entry.value))
    if entry.pricer == "profile":
        known = Profile.from_json(entry.value)
        return (
            f"{float(known.peak_rate):,.0f} B per row at the peak, ratio {float(known.ratio):.2f}, "
            f"{known.packed_rows:,} rows"
        )
    residual = Residual.from_json(entry.value)
    if not residual.is_short:
        return "every price was enough"
    return (
        f"{format_bytes(int(residual.intercept + residual.margin))} + {residual.per_row:,.1f} B per row + "
        f"{residual.per_token:,.1f} B per token"
    )
