"""One request: a token sequence and what the caller wants back for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trainer_rank.errors import RequestError

IGNORED: Final = -100
"""Label of a position that is not scored."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """A token sequence with what is wanted from it.

    Tokens and labels may be lists, NumPy arrays, or anything that speaks NumPy's array protocol or DLPack (a tensor
    of any library, on the host); they are copied, so later changes by the caller have no effect.

    Attributes:
        tokens: (N,) int64 token ids, at least one.
        labels: (N,) or (N, K) int64, or None. ``labels[i]`` is scored *from* position i, that is by the distribution
            after ``tokens[: i + 1]``; -100 is ignored and gives 0. ``Request.next_token`` builds them from a sequence.
            A request without labels wants nothing: it is inactive and runs nothing.
        weight: Factor on the request's share of a normalised loss; finite and not negative.
        no_grad: Run without building a graph.
        adapter: Name of the adapter to run with; None is the runtime's own.
        payload: Anything the loss needs with it (advantages, old log-probs); never looked at.

    Raises:
        RequestError: A field breaks its rule; the message names field, rule and value.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64] | None = None
    weight: float = 1.0
    no_grad: bool = False
    adapter: str | None = None
    payload: Any = None

    def __post_init__(self) -> None:
        tokens = _integers(self.tokens, field="tokens")
        if tokens.ndim == 2 and tokens.shape[0] == 1:
            tokens = tokens[0]
        if tokens.ndim != 1:
            raise RequestError(f"tokens must have shape (N,) or (1, N), got {tokens.shape}", field="tokens")
        if tokens.size == 0:
            raise RequestError("tokens must hold at least one token, got none; drop the request", field="tokens")
        if tokens.min() < 0:
            where = int(np.argmin(tokens))
            raise RequestError(
                f"tokens must not be negative, got {int(tokens[where])} at position {where}", field="tokens"
            )
        object.__setattr__(self, "tokens", _frozen(tokens))
        if self.labels is not None:
            object.__setattr__(self, "labels", _frozen(_labels(self.labels, tokens.size)))
        weight = float(self.weight)
        if not math.isfinite(weight) or weight < 0:
            raise RequestError(f"weight must be finite and not negative, got {self.weight!r}", field="weight")
        object.__setattr__(self, "weight", weight)

    @classmethod
    def next_token(
        cls,
        tokens: Sequence[int] | NDArray[Any] | Any,
        *,
        trained: Sequence[bool] | NDArray[Any] | Any = None,
        weight: float = 1.0,
        no_grad: bool = False,
        adapter: str | None = None,
        payload: Any = None,
    ) -> Request:
        """Return a request that scores each token from the position before it.

        Args:
            tokens: (N,) token ids.
            trained: (N,) mask over the *tokens*: True where the token itself is scored. None scores all. The first
                token has nothing before it and is never scored; the last position predicts nothing and is ignored.
            weight, no_grad, adapter, payload: As in ``Request``.
        """
        ids = _integers(tokens, field="tokens").reshape(-1)
        labels = np.full(ids.shape, IGNORED, dtype=np.int64)
        labels[:-1] = ids[1:]
        if trained is not None:
            mask = _array(trained, field="trained").astype(bool).reshape(-1)
            if mask.shape != ids.shape:
                raise RequestError(
                    f"trained must have one entry per token: {ids.size} tokens, {mask.size} entries", field="trained"
                )
            labels[:-1][~mask[1:]] = IGNORED
        return cls(tokens=ids, labels=labels, weight=weight, no_grad=no_grad, adapter=adapter, payload=payload)

    @property
    def num_tokens(self) -> int:
        """Length N."""
        return int(self.tokens.size)

    @property
    def num_trained(self) -> int:
        """Number of scored labels."""
        return 0 if self.labels is None else int((self.labels != IGNORED).sum())

    @property
    def active(self) -> bool:
        """Whether anything is wanted; an inactive request runs nothing."""
        return self.labels is not None

    def __repr__(self) -> str:
        parts = [f"{self.num_tokens} tokens"]
        if self.labels is not None:
            parts.append(f"{self.num_trained} scored")
        if self.weight != 1.0:
            parts.append(f"weight={self.weight}")
        if self.no_grad:
            parts.append("no_grad")
        if self.adapter is not None:
            parts.append(f"adapter={self.adapter!r}")
        return f"Request({', '.join(parts)})"


def _array(value: Any, *, field: str) -> NDArray[Any]:
    """Return a NumPy view of lists, arrays and host tensors of any library, without importing that library."""
    if hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray):
        try:
            return np.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError) as error:
            raise RequestError(
                f"{field} must lie on the host to be read, got {type(value).__name__}: {error}; move it to the CPU",
                field=field,
            ) from error
    try:
        return np.asarray(value)
    except ValueError as error:
        raise RequestError(f"{field} must be a flat sequence of numbers: {error}", field=field) from error


def _integers(value: Any, *, field: str) -> NDArray[np.int64]:
    array = _array(value, field=field)
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise RequestError(f"{field} must be integers, got dtype {array.dtype}", field=field)
    return array.astype(np.int64)


def _labels(value: Any, length: int) -> NDArray[np.int64]:
    labels = _integers(value, field="labels")
    if labels.ndim >= 2 and labels.shape[0] == 1 and length != 1:
        labels = labels[0]
    if labels.ndim not in (1, 2) or labels.shape[0] != length or labels.size == 0:
        raise RequestError(
            f"labels must have shape (N,) or (N, K) for the request's N = {length} tokens, got {labels.shape}; "
            f"pad positions that are not scored with {IGNORED}",
            field="labels",
        )
    wrong = (labels < 0) & (labels != IGNORED)
    if wrong.any():
        where = tuple(int(axis[0]) for axis in np.nonzero(wrong))
        raise RequestError(
            f"labels must be token ids or {IGNORED}, got {int(labels[where])} at position {where[0]}", field="labels"
        )
    return labels


def _frozen(array: NDArray[np.int64]) -> NDArray[np.int64]:
    copy = np.array(array, dtype=np.int64, copy=True)
    copy.setflags(write=False)
    return copy
