"""A caller's own functions, told the figures of every step and evaluation. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from trainer_rank.errors import TrainingError
from trainer_rank.training.records import EvaluationRecord, StepRecord

Scalars = dict[str, float]
"""Figures by name: those of a step under the names of ``StepRecord``, those of its loss with ``metrics/`` and those of
an evaluation with ``evaluation/`` in front. A figure that was not measured is not there."""

Callback = Callable[[int, Scalars], None]
"""``callback(step, scalars)``, after the step's line and any checkpoint due with it are on the disk."""


def step_scalars(record: StepRecord) -> Scalars:
    """Return the figures of a step."""
    plain = {name: value for name, value in asdict(record).items() if isinstance(value, int | float) and name != "step"}
    return {**plain, **{f"metrics/{name}": value for name, value in record.metrics.items()}}


def evaluation_scalars(record: EvaluationRecord) -> Scalars:
    """Return the figures of an evaluation."""
    return {f"evaluation/{name}": value for name, value in asdict(record).items() if name != "step"}


def tell(callbacks: Sequence[Callback], step: int, scalars: Scalars) -> None:
    """Call each with figures of its own copy.

    Raises:
        TrainingError: One raised; the message names it.
    """
    for callback in callbacks:
        try:
            callback(step, dict(scalars))
        except Exception as error:
            raise TrainingError(
                f"step {step}: the callback {name_of(callback)} raised {type(error).__name__}: {error}"
            ) from error


def name_of(callback: Callback) -> str:
    """Return how its author knows it."""
    found = getattr(callback, "__qualname__", None)
    return found if isinstance(found, str) else type(callback).__qualname__
