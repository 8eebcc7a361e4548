"""``trainer-rank train config.yaml``"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Annotated

import typer

from trainer_rank.errors import ConfigError


def train(
    config: Annotated[Path, typer.Argument(help="YAML file with the run's configuration.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document per event instead of a table.")] = False,
    warm_up: Annotated[
        str | None, typer.Option("--warm-up", help="worst: run the request that needs most first, without training.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option("--resume", help="Go on with this run folder, or with the latest one: latest.")
    ] = None,
    allow_changed: Annotated[
        bool, typer.Option("--allow-changed", help="Resume even if the steps to come are those of another run.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Train as CONFIG says; leaves a folder with metrics, decisions and the adapter."""
    from trainer_rank.cli.display import JsonLines, Table
    from trainer_rank.training.load_config import load_config

    loaded = load_config(config)
    if warm_up is not None:
        if warm_up not in ("none", "worst"):
            raise ConfigError(f"--warm-up must be none or worst, got {warm_up!r}")
        loaded = loaded.model_copy(update={"warm_up": warm_up})
    if allow_changed and resume is None:
        raise ConfigError("--allow-changed belongs to --resume; give a run folder or latest, or leave it out")
    # Threads that spin while they wait for each other lose four fifths of the speed as soon as another process wants
    # their cores (2 threads, 2 cores, load 5: 137 s spinning, 31 s passive); waiting passively costs microseconds.
    # Read when torch is first imported, so it is set before; a caller's own choice stands.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Imported after the configuration is known to be valid: torch and transformers take seconds.
    from transformers.utils.logging import disable_progress_bar

    from trainer_rank.training.loop import train as run

    disable_progress_bar()
    # PEFT asks Transformers for a property under its former name; a user can do nothing about it.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")
    with JsonLines() if json else Table() as display:
        run(loaded, progress=display, resume=resume, allow_changed=allow_changed)
