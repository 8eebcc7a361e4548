"""A loss of the user's own: a function found by name before anything is loaded, and checked for what it returns."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from trainer_rank.errors import ConfigError, TrainingError
from trainer_rank.training.losses.base import Loss, ScoredBatch


def load_function(spec: str) -> Loss:
    """Return the function that ``module:function`` or ``path/to/file.py:function`` names.

    Raises:
        ConfigError: The module or file is missing or fails when it is imported, or the name is missing, cannot be
            called, or does not take a micro-batch alone.
    """
    where, _, name = spec.rpartition(":")
    module = _from_file(Path(where)) if where.endswith(".py") else _from_module(where)
    found = getattr(module, name, None)
    if found is None:
        known = sorted(
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        )
        has = f"its functions are {', '.join(known)}" if known else "it has no functions"
        raise ConfigError(f"loss.function: {where!r} must have the name {name!r}; {has}")
    if not callable(found):
        raise ConfigError(f"loss.function: {spec!r} must be a function, got a value of type {type(found).__name__}")
    _check_signature(spec, found)
    function: Loss = found
    return function


def checked(value: object, micro_batch: ScoredBatch, *, function: str, step: int) -> Tensor:
    """Return what a loss function returned, once it is known that it can be trained on.

    Args:
        value: What it returned.
        micro_batch: What it was given.
        function: Its name, for the message.
        step: 1-based; 0 before the first.

    Raises:
        TrainingError: It is no scalar tensor, has no graph although something is scored, or is not finite.
    """
    if not isinstance(value, Tensor) or value.ndim != 0 or not value.is_floating_point():
        raise _wrong(function, step, f"must return a scalar tensor of floats, got {_show(value)}", "sum it up")
    if not value.requires_grad and any(request.num_trained for request in micro_batch.requests):
        raise _wrong(
            function,
            step,
            f"must return a value with a graph, got {_show(value)} with requires_grad False",
            "use result.logprobs without detach, item or no_grad",
        )
    number = float(value.detach())
    if not math.isfinite(number):
        raise _wrong(function, step, f"must return a finite value, got {number}", "look for log(0), 0/0 or an overflow")
    return value


def _from_module(where: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"loss.function: the module {where!r} cannot be imported ({error}); install it or put its folder on "
            "PYTHONPATH, or name a file: path/to/file.py:function"
        ) from error
    except Exception as error:
        raise _broken(where, error) from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(
            f"loss.function: there must be a file {str(path)!r}, and there is none; relative paths count from the "
            "current folder"
        )
    name = f"trainer_rank_loss_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a file that ends in .py has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their own module up while it is being run.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _broken(str(path), error) from error
    return module


def _broken(where: str, error: Exception) -> ConfigError:
    return ConfigError(f"loss.function: importing {where!r} failed: {type(error).__name__}: {error}; correct it first")


def _check_signature(spec: str, found: Any) -> None:
    try:
        signature = inspect.signature(found)
    except ValueError:
        # A function of a compiled module may have no signature to look at.
        return
    try:
        signature.bind(object())
    except TypeError as error:
        raise ConfigError(
            f"loss.function: {spec!r} must take a micro-batch as its only required argument ({error}); its signature "
            f"is {signature}"
        ) from error


def _wrong(function: str, step: int, rule: str, next_step: str) -> TrainingError:
    when = f"step {step}" if step else "warm-up"
    return TrainingError(f"{when}: loss.function {function!r} {rule}; {next_step}")


def _show(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} of type {type(value).__name__}"
