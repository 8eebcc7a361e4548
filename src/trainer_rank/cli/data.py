"""``trainer-rank data check``: every fault of a data file, and what the file is made of, before any model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainer_rank.cli.examples import epilog
from trainer_rank.errors import ConfigError

HAS_FAULTS = 2

data = typer.Typer(help="Look at data before a run.", no_args_is_help=True, rich_markup_mode=None)


@data.command("check", short_help="Check every line of a data file.", epilog=epilog("data check"))
def check(
    file: Annotated[Path, typer.Argument(help="JSON Lines or Parquet file.")],
    model: Annotated[
        str | None, typer.Option(help="Folder with config.json and tokenizer; needed for messages and texts.")
    ] = None,
    loss: Annotated[str, typer.Option(help="Loss whose fields every line must have: sft, cispo, ...")] = "sft",
    train_on: Annotated[str, typer.Option(help="Assistant messages that are trained: all or last.")] = "all",
    limit_errors: Annotated[int, typer.Option(help="Most faults that are listed; the rest are counted.")] = 20,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Check every line of FILE, list all faults, and show lengths, sharing and duplicates.

    Exit status 0: every line can be trained. 2: there are faults.
    """
    from typing import get_args

    from trainer_rank.training.config import LossSection

    losses = get_args(LossSection.model_fields["name"].annotation)
    if loss not in losses:
        raise ConfigError(f"--loss must be {' or '.join(losses)}, got {loss!r}")
    if train_on not in ("all", "last"):
        raise ConfigError(f"--train-on must be all or last, got {train_on!r}")
    if limit_errors < 1:
        raise ConfigError(f"--limit-errors must be at least 1, got {limit_errors}")
    from trainer_rank.cli.data_display import print_json, print_text
    from trainer_rank.training.data_check import check_data
    from trainer_rank.training.formats import Words
    from trainer_rank.training.model_limits import limits_of
    from trainer_rank.training.rollouts import Limits

    limits = Limits(loss=loss) if model is None else limits_of(model, loss=loss, field="--model")
    words = Words(model=model, train_on="last" if train_on == "last" else "all")
    report = check_data(file, limits, words, most_faults=limit_errors)
    # Loading a tokenizer takes seconds, so it is loaded for what it is needed for.
    needed = model is not None and report.summary is not None and report.summary.near_prefixes
    decode = words.decoder() if needed else None
    if json:
        print_json(report, decode)
    else:
        print_text(report, decode)
    if report.num_faults:
        raise typer.Exit(HAS_FAULTS)
