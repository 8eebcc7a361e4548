"""``trainer-rank init``: a configuration with every key, its meaning and its default, to be edited."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainer_rank.errors import ConfigError


def init(
    file: Annotated[Path, typer.Argument(help="YAML file to write.")] = Path("trainer-rank.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE if it exists.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Write a commented configuration to FILE: every key, its meaning and its default.

    Set model.path and data.path in it, and what else should differ.
    """
    from trainer_rank.training.config_template import config_template

    try:
        with file.open("w" if force else "x", encoding="utf-8") as out:
            out.write(config_template())
    except FileExistsError as error:
        raise ConfigError(f"{file}: exists and is not overwritten; name another file, or add --force") from error
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be written ({error.strerror}); name a file in a folder that exists"
        ) from error
    typer.echo(f"{file}: set model.path and data.path, then run: trainer-rank train {file}")
