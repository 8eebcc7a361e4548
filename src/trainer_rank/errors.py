"""Every exception the library raises on purpose.

    TrainerRankError
    ├── RequestError (ValueError)         a request is malformed: field, rule, value, next step
    ├── ConfigError (ValueError)          a configuration is malformed
    ├── DataError (ValueError)            a data file is malformed: path, line, column
    ├── SnapshotError (ValueError)        a snapshot of the CUDA allocator cannot be read or replayed
    ├── ReplayError (ValueError)          a recorded decision lacks what its price was made of
    ├── UnsupportedModelError             a model (or one of its layers) cannot be honoured: layer, reason
    ├── SelfTestError (RuntimeError)      packed and alone disagree on this backend; nothing was trained
    ├── BackwardError (RuntimeError)      backward was asked of a pass that can no longer give it
    ├── MeterError (RuntimeError)         device memory cannot be measured here
    ├── TrainingError (RuntimeError)      a training run cannot go on: step, reason
    │   └── TrainingInterruptedError      it was asked to stop: checkpoint, how to resume
    └── TrainerRankMemoryError (RuntimeError)
                                          refused before anything ran, or out of memory inside an admitted pass

A refusal happens before anything ran; a failure after. Both are a ``TrainerRankMemoryError``: ``refused`` tells which.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer_rank.admission import Admission


class TrainerRankError(Exception):
    """Base of everything the library raises on purpose."""


class RequestError(TrainerRankError, ValueError):
    """A request is malformed.

    Attributes:
        field: The offending field, as the caller spells it.
        index: Flat index of the request in the caller's order, when known.
    """

    def __init__(self, message: str, *, field: str, index: int | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.index = index


class ConfigError(TrainerRankError, ValueError):
    """A configuration is malformed; the message names the key, the rule and the nearest valid key."""


class DataError(TrainerRankError, ValueError):
    """A data file is malformed.

    Attributes:
        path: The file.
        line: 1-based line, when the format has lines.
        column: 1-based column of the fault, when known.
    """

    def __init__(self, message: str, *, path: Path, line: int | None = None, column: int | None = None) -> None:
        where = str(path)
        if line is not None:
            where += f":{line}"
            if column is not None:
                where += f":{column}"
        super().__init__(f"{where}: {message}")
        self.path = path
        self.line = line
        self.column = column


class SnapshotError(TrainerRankError, ValueError):
    """A snapshot of the CUDA allocator is malformed, or holds something else than plain data; the message says what."""


class ReplayError(TrainerRankError, ValueError):
    """A recorded decision lacks an entry that its price depends on; the message names it."""


class StoreError(TrainerRankError, RuntimeError):
    """What was learned cannot be read from or written to its file."""


class UnsupportedModelError(TrainerRankError):
    """A model cannot be run as prefix trees with unchanged numbers.

    Attributes:
        layer: Qualified name of the layer or config entry at fault.
        reason: Why it cannot be honoured.
    """

    def __init__(self, *, layer: str, reason: str, next_step: str) -> None:
        super().__init__(f"{layer}: {reason}. {next_step}")
        self.layer = layer
        self.reason = reason


class SelfTestError(TrainerRankError, RuntimeError):
    """Packed and one-by-one execution disagree on this backend; nothing was trained."""


class EnvelopeError(TrainerRankError, RuntimeError):
    """The memory of passes could not be solved for from their traces; whole passes are run dry instead."""


class BackwardError(TrainerRankError, RuntimeError):
    """Backward was asked of a pass that can no longer give it."""


class MeterError(TrainerRankError, RuntimeError):
    """Device memory cannot be measured here; the message says what is missing."""


class TrainingError(TrainerRankError, RuntimeError):
    """A training run cannot go on; the message names the step, the reason and what is already saved."""


class TrainingInterruptedError(TrainingError):
    """A training run was asked to stop and did, between two passes; the message says how it goes on."""


class TrainerRankMemoryError(TrainerRankError, RuntimeError):
    """A pass was refused before it ran, or ran out of memory after it was admitted.

    Attributes:
        admission: The admission record with its price by term and its budget reading.
        refused: True when nothing ran; False when an admitted pass failed.
        phase: Phase that failed (``forward``, ``head``, ``backward``, ...), or the phase of the predicted peak.
        term: Largest term of the price.
        short_bytes: Bytes missing, for a refusal; 0 for a failure.
        request_index: Flat index of the request that cannot fit alone, when one is to blame.
        request_length: Its length in tokens.

    The device's own out-of-memory error, if there was one, is ``__cause__``.
    """

    def __init__(
        self,
        message: str,
        *,
        admission: Admission | None,
        refused: bool,
        phase: str,
        term: str,
        short_bytes: int = 0,
        request_index: int | None = None,
        request_length: int | None = None,
    ) -> None:
        super().__init__(message)
        self.admission = admission
        self.refused = refused
        self.phase = phase
        self.term = term
        self.short_bytes = short_bytes
        self.request_index = request_index
        self.request_length = request_length
