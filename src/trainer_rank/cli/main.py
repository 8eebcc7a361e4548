"""The command ``trainer-rank``: exit status 0 for success, 1 for refused or failed, 2 for wrong input.

Errors the library raises on purpose are printed as prose; ``--debug`` shows their traceback instead.
"""

from __future__ import annotations

import os
import sys
from typing import Final

from trainer_rank.errors import ConfigError, DataError, RequestError, TrainerRankError, TrainingInterruptedError

SUCCESS: Final = 0
FAILED: Final = 1
WRONG_INPUT: Final = 2
INTERRUPTED: Final = 130

# Top-level modules that the extra ``cli`` installs, under the names Python reports when one is missing.
_EXTRA_MODULES: Final = frozenset(
    {
        "typer",
        "click",
        "rich",
        "plotly",
        "yaml",
        "pydantic",
        "pydantic_core",
        "torch",
        "transformers",
        "peft",
        "accelerate",
        "safetensors",
    }
)


def main() -> None:
    """Run the command line of this process and exit."""
    _choose_allocator()
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit status; prose for errors goes to stderr."""
    try:
        from trainer_rank.cli.app import invoke

        return invoke(arguments)
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in _EXTRA_MODULES:
            raise
        return _say(
            f"the command line needs the package {module!r}, which is not installed; "
            'run: pip install "trainer-rank[cli]"',
            FAILED,
        )
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except TrainingInterruptedError as error:
        return _say(str(error), INTERRUPTED)
    except TrainerRankError as error:
        if "--debug" in arguments:
            raise
        return _say(str(error), WRONG_INPUT if isinstance(error, ConfigError | DataError | RequestError) else FAILED)


def _choose_allocator() -> None:
    """Ask torch for expandable segments, which waste less than cut ones, unless the user chose (``meters.waste``).

    torch reads the variable when it is imported.
    """
    if not os.environ.get("PYTORCH_ALLOC_CONF") and not os.environ.get("PYTORCH_CUDA_ALLOC_CONF"):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _say(message: str, status: int) -> int:
    print(f"trainer-rank: {message}", file=sys.stderr)
    return status
