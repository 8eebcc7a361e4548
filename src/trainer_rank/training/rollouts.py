"""Rollouts: one request per line of a JSON Lines file, checked field by field. Imports no torch.

    {"tokens": [1, 733, 28, 2], "trained": [0, 0, 1, 1], "group": "task-7", "weight": 1.0,
     "advantage": 0.5, "old_logprobs": [null, null, -1.25, -0.1]}

``tokens`` and ``trained`` are required and have one entry per token: ``trained[t]`` says whether token t is learnt.
Token 0 has no position that predicts it, so ``trained[0]`` has no effect. ``old_logprobs[t]`` is the log-probability
token t had when it was sampled, and is needed wherever ``trained[t]`` is 1; other entries may be null, here and in the
other lists: ``ref_logprobs``, the same under the reference model, and ``advantages``, one per token instead of one per
request. ``reward`` is a number, ``chosen`` says which member of a ``pair`` was preferred. Requests of the same
``group`` stay in one optimizer step; a pair without a group is one. Blank lines are skipped.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from trainer_rank.errors import DataError
from trainer_rank.training.loss_options import needed_fields

FIELDS: Final = (
    "tokens",
    "trained",
    "group",
    "weight",
    "advantage",
    "old_logprobs",
    "reward",
    "advantages",
    "ref_logprobs",
    "chosen",
    "pair",
)

# A log-probability computed in low precision may come out slightly above 0.
_LOGPROB_SLACK: Final = 1e-3
_MAX_TOKEN: Final = 2**31 - 1
_MAX_FLOAT32: Final = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One line of a rollouts file.

    Attributes:
        tokens: int64, shape (N,).
        trained: bool, shape (N,).
        group: Name shared by the requests that must stay in one optimizer step; None stands alone.
        weight: Factor of this request's loss, finite and not negative.
        advantage: Finite; None when the line has none.
        old_logprobs: float32, shape (N,), aligned with ``tokens``, 0 where the line says null; None when it has none.
        line: 1-based line in the file.
        reward: Finite; None when the line has none.
        advantages: float32, shape (N,), aligned with ``tokens``, 0 where the line says null; None when it has none.
        ref_logprobs: As ``old_logprobs``, under the reference model.
        chosen: Whether this is the preferred member of its pair; None when the line does not say.
        pair: Name of the pair within the group; None means that the group is the pair.
    """

    tokens: npt.NDArray[np.int64]
    trained: npt.NDArray[np.bool_]
    group: str | None
    weight: float
    advantage: float | None
    old_logprobs: npt.NDArray[np.float32] | None
    line: int
    reward: float | None = None
    advantages: npt.NDArray[np.float32] | None = None
    ref_logprobs: npt.NDArray[np.float32] | None = None
    chosen: bool | None = None
    pair: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the model and the loss demand of every rollout; None where it is not known.

    Attributes:
        vocabulary_size, context_length: Of the model.
        loss: Its name, for messages.
        needs: Fields every line must have, as ``needed_fields`` gives them; None takes those of the loss's defaults.
    """

    vocabulary_size: int | None = None
    context_length: int | None = None
    loss: str = "sft"
    needs: frozenset[str] | None = None

    def needed(self) -> frozenset[str]:
        """Return the fields every line must have."""
        return needed_fields(self.loss) if self.needs is None else self.needs


def read_rollouts(path: Path, limits: Limits | None = None) -> list[Rollout]:
    """Return the rollouts of the JSON Lines file ``path`` of token ids, in file order; at least one.

    Raises:
        DataError: The file cannot be read or holds no request, or a line is cut off, is not a JSON object, has an
            unknown, missing or wrongly typed field, or breaks a rule of ``limits``. Says file, line and, for text
            that does not parse, column.
    """
    chosen = limits if limits is not None else Limits()
    rollouts = [rollout_of(path, number, parse_line(path, number, raw), chosen) for number, raw in raw_lines(path)]
    if not rollouts:
        raise DataError("holds no request; write one JSON document per line", path=path)
    return rollouts


def raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not blank, with their 1-based numbers.

    Raises:
        DataError: The file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if raw.strip():
                    yield number, raw
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror}); give the path of a JSON Lines file", path=path) from error


def parse_line(path: Path, number: int, raw: bytes) -> dict[str, Any]:
    """Return the fields of one line, as JSON has them.

    Raises:
        DataError: The line is not UTF-8, not a JSON object, cut off, or repeats a field.
    """
    try:
        text = raw.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"byte {error.start + 1} of the line is not UTF-8; write the file as UTF-8 text",
            path=path,
            line=number,
            column=len(raw[: error.start].decode("utf-8")) + 1,
        ) from error
    try:
        entries = json.loads(text, object_pairs_hook=lambda pairs: _unique(path, number, pairs))
    except json.JSONDecodeError as error:
        if raw.endswith(b"\n"):
            message = f"is not valid JSON: {error.msg}; correct the line"
        else:
            message = f"is half-written ({error.msg}, and no line break follows); finish the line or delete it"
        raise DataError(message, path=path, line=number, column=error.colno) from error
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"is not valid JSON: {error}", path=path, line=number) from error
    except RecursionError as error:
        raise DataError("is nested too deeply to be a rollout", path=path, line=number) from error
    if not isinstance(entries, dict):
        raise DataError(
            f"a line must be a JSON object with the fields tokens and trained, got {_show(entries)}",
            path=path,
            line=number,
        )
    return entries


def _unique(path: Path, number: int, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{twice}: is given twice in one line; keep one", path=path, line=number)
    return entries


def rollout_of(path: Path, number: int, entries: dict[str, Any], limits: Limits) -> Rollout:
    """Return the rollout that the entries of one line (or row) describe.

    Raises:
        DataError: As ``read_rollouts``.
    """
    line = _Line(path=path, number=number, entries=entries)
    line.check_names()
    tokens = line.tokens(limits)
    trained = line.trained(len(tokens))
    line.check_needed(limits)
    return Rollout(
        tokens=tokens,
        trained=trained,
        group=line.text("group") if entries.get("group") is not None else line.text("pair"),
        weight=line.weight(),
        advantage=line.number_or_none("advantage"),
        old_logprobs=line.logprobs("old_logprobs", trained),
        line=number,
        reward=line.number_or_none("reward"),
        advantages=line.numbers("advantages", trained),
        ref_logprobs=line.logprobs("ref_logprobs", trained),
        chosen=line.chosen(),
        pair=line.text("pair"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """The parsed fields of one line, each with the method that checks it."""

    path: Path
    number: int
    entries: dict[str, Any]

    def fail(self, message: str) -> NoReturn:
        raise DataError(message, path=self.path, line=self.number)

    def check_names(self) -> None:
        for name in self.entries:
            if name not in FIELDS:
                close = difflib.get_close_matches(name, FIELDS, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"the fields are {', '.join(FIELDS)}"
                self.fail(f"unknown field {name!r}; {hint}")

    def sequence(self, name: str) -> list[Any]:
        if name not in self.entries:
            self.fail(f"{name}: is required; write a list with one entry per token")
        value = self.entries[name]
        if not isinstance(value, list):
            self.fail(f"{name}: must be a list with one entry per token, got {_show(value)}")
        return value

    def tokens(self, limits: Limits) -> npt.NDArray[np.int64]:
        values = self.sequence("tokens")
        if not values:
            self.fail("tokens: must hold at least one token, got an empty list; delete the line")
        size = limits.vocabulary_size
        highest = _MAX_TOKEN if size is None else size - 1
        for index, value in enumerate(values):
            if type(value) is not int:
                self.fail(f"tokens[{index}]: must be an integer token id, got {_show(value)}")
            if not 0 <= value <= highest:
                known = "" if size is None else f", the model's vocabulary of {size}"
                self.fail(
                    f"tokens[{index}]: must be between 0 and {highest}{known}, got {_show(value)}; "
                    "encode the data with the model's own tokenizer"
                )
        limit = limits.context_length
        if limit is not None and len(values) > limit:
            self.fail(
                f"tokens: has {len(values)} tokens, and the model's context is {limit}; "
                "shorten or leave out this request (requests are never truncated)"
            )
        return np.asarray(values, dtype=np.int64)

    def trained(self, num_tokens: int) -> npt.NDArray[np.bool_]:
        values = self.sequence("trained")
        self.same_length("trained", values, num_tokens)
        for index, value in enumerate(values):
            if type(value) not in (int, bool) or value not in (0, 1):
                self.fail(f"trained[{index}]: must be 0 or 1, got {_show(value)}")
        return np.asarray(values, dtype=np.bool_)

    def same_length(self, name: str, values: list[Any], num_tokens: int) -> None:
        if len(values) != num_tokens:
            self.fail(
                f"{name}: must have one entry per token, got {len(values)} entries for {num_tokens} tokens; "
                "the writer pairs them up wrongly or one of the lists was cut"
            )

    def check_needed(self, limits: Limits) -> None:
        given = {name for name, value in self.entries.items() if value is not None}
        if {"advantage", "advantages"} <= given:
            self.fail("advantages: stands beside advantage; keep one, a number per token or one per request")
        if "advantages" in given:
            given.add("advantage")
        for name in FIELDS:
            if name in limits.needed() - given:
                self.fail(f"{name}: is required by the loss {limits.loss!r}; add it, or train with the loss 'sft'")

    def text(self, name: str) -> str | None:
        value = self.entries.get(name)
        if value is not None and not isinstance(value, str):
            self.fail(f"{name}: must be a string or null, got {_show(value)}")
        return value

    def chosen(self) -> bool | None:
        value = self.entries.get("chosen")
        if value is not None and not isinstance(value, bool):
            self.fail(f"chosen: must be true or false, got {_show(value)}")
        return value

    def weight(self) -> float:
        value = self.finite("weight", self.entries.get("weight", 1.0))
        if value < 0:
            self.fail(f"weight: must not be negative, got {value}; the sign of a request belongs in advantage")
        return value

    def number_or_none(self, name: str) -> float | None:
        value = self.entries.get(name)
        return None if value is None else self.finite(name, value)

    def numbers(self, name: str, trained: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32] | None:
        if self.entries.get(name) is None:
            return None
        values = self.sequence(name)
        self.same_length(name, values, len(trained))
        result = np.zeros(len(trained), dtype=np.float32)
        for index, value in enumerate(values):
            if value is None:
                if trained[index] and index > 0:
                    self.fail(f"{name}[{index}]: must be a number where trained is 1, got null")
                continue
            number = self.finite(f"{name}[{index}]", value)
            if abs(number) > _MAX_FLOAT32:
                self.fail(f"{name}[{index}]: must fit into a float32, got {number}; find where the writer goes wrong")
            result[index] = number
        return result

    def logprobs(self, name: str, trained: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32] | None:
        result = self.numbers(name, trained)
        if result is not None and (result > _LOGPROB_SLACK).any():
            index = int(np.argmax(result > _LOGPROB_SLACK))
            self.fail(f"{name}[{index}]: must be a log-probability, at most 0, got {self.entries[name][index]}")
        return result

    def finite(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(f"{name}: must be a number, got {_show(value)}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            self.fail(f"{name}: must be finite, got {number}; find where the writer divides by zero")
        return number


def _show(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} of type {type(value).__name__}"
