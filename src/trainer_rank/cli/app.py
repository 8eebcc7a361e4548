"""The typer application: its own options, and one subcommand per module."""

from __future__ import annotations

from typing import Annotated

import typer

from trainer_rank import __version__
from trainer_rank.cli.data import data
from trainer_rank.cli.examples import epilog
from trainer_rank.cli.init import init
from trainer_rank.cli.plan import plan
from trainer_rank.cli.profile import profile
from trainer_rank.cli.train import train

app = typer.Typer(
    name="trainer-rank",
    help="Post-train language models on requests that share prefixes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("init", short_help="Write a commented configuration.", epilog=epilog("init"))(init)
app.add_typer(data, name="data")
app.command("plan", short_help="Will a training step fit a GPU?", epilog=epilog("plan"))(plan)
app.add_typer(profile, name="profile")
app.command("train", short_help="Train as a configuration says.", epilog=epilog("train"))(train)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trainer-rank {__version__}")
        raise typer.Exit


@app.callback(epilog=epilog(""))
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Post-train language models on requests that share prefixes."""


def invoke(arguments: list[str]) -> int:
    """Run one command line and return its exit status.

    Raises:
        TrainerRankError: The command was refused or failed, or its input is wrong.
    """
    try:
        typer.main.get_command(app).main(args=arguments, prog_name="trainer-rank")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0
