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

BASE: Final = "<base>"
"""Adapter name that stands for none: the frozen model under the adapters, for reference log-probs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """A token sequence with what is wanted from it.

    Tokens and labels may be lists, NumPy arrays, or anything that speaks NumPy's array protocol or DLPack (a tensor
    of any library, on the host); they are copied, so later changes by the caller have no effect.

    Attributes:
        tokens: (N,) int64 token ids, at least one.
        labels: (N,) or (N, K) int64, or None. ``labels[i]`` is scored *from* position i, that is by the distribution
            after ``tokens[: i + 1]``; -100 is ignored and gives 0. ``Request.next_token`` builds them from a sequence.
        top_k: Also return the k likeliest next tokens with their log-probs, at the positions ``at``; None: not.
        logits: Also return the scores of the whole vocabulary at the positions ``at``: vocabulary times element size
            bytes each.
        hidden_states: Also return the final normalised hidden states at the positions ``at``.
        at: (M,) int64 positions for ``top_k``, ``logits`` and ``hidden_states``, in any order; None is all N.
        weight: Factor on the request's share of a normalised loss; finite and not negative.
        no_grad: Run without building a graph.
        adapter: Name of the adapter to run with; None is the runtime's own, ``BASE`` is the model without any.
        payload: Anything the loss needs with it (advantages, old log-probs); never looked at.

    A request that wants neither labels nor another output is inactive: it runs nothing.

    Raises:
        RequestError: A field breaks its rule; the message names field, rule and value.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64] | None = None
    top_k: int | None = None
    logits: bool = False
    hidden_states: bool = False
    at: NDArray[np.int64] | None = None
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
        self._check_dense(tokens.size)
        weight = float(self.weight)
        if not math.isfinite(weight) or weight < 0:
            raise RequestError(f"weight must be finite and not negative, got {self.weight!r}", field="weight")
        object.__setattr__(self, "weight", weight)

    def _check_dense(self, length: int) -> None:
        """Check what is asked for beside labels, and put ``at`` into its final form."""
        if self.top_k is not None and (not _is_int(self.top_k) or self.top_k < 1):
            raise RequestError(f"top_k must be a whole number of at least 1, got {self.top_k!r}", field="top_k")
        if self.top_k is not None:
            object.__setattr__(self, "top_k", int(self.top_k))
        for field in ("logits", "hidden_states"):
            if not isinstance(getattr(self, field), bool):
                raise RequestError(
                    f"{field} must be True or False, got {getattr(self, field)!r}; say where with at", field=field
                )
        if self.at is None:
            return
        if not self.wants_dense:
            raise RequestError(
                "at says where top_k, logits or hidden_states are wanted, and none of them is; set one or drop at",
                field="at",
            )
        at = _integers(self.at, field="at")
        if at.ndim != 1 or not at.size:
            raise RequestError(f"at must have shape (M,) with at least one position, got {at.shape}", field="at")
        wrong = at[(at < 0) | (at >= length)]
        if wrong.size:
            raise RequestError(f"at must hold positions in [0, {length}), got {int(wrong[0])}", field="at")
        object.__setattr__(self, "at", _frozen(at))

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
        **outputs: Any,
    ) -> Request:
        """Return a request that scores each token from the position before it.

        Args:
            tokens: (N,) token ids.
            trained: (N,) mask over the *tokens*: True where the token itself is scored. None scores all. The first
                token has nothing before it and is never scored; the last position predicts nothing and is ignored.
            weight, no_grad, adapter, payload: As in ``Request``.
            **outputs: ``top_k``, ``logits``, ``hidden_states`` and ``at``, as in ``Request``.
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
        return cls(
            tokens=ids, labels=labels, weight=weight, no_grad=no_grad, adapter=adapter, payload=payload, **outputs
        )

    @property
    def num_tokens(self) -> int:
        """Length N."""
        return int(self.tokens.size)

    @property
    def num_trained(self) -> int:
        """Number of scored labels; of a request without labels, the positions of its other outputs.

        It is what a normalised loss counts.
        """
        if self.labels is None:
            return int(self.positions.size)
        return int((self.labels != IGNORED).sum())

    @property
    def wants_dense(self) -> bool:
        """Whether top-k, logits or hidden states are wanted."""
        return self.top_k is not None or self.logits or self.hidden_states

    @property
    def positions(self) -> NDArray[np.int64]:
        """(M,) where top-k, logits and hidden states are wanted; empty when none is."""
        if not self.wants_dense:
            return np.empty(0, dtype=np.int64)
        return np.arange(self.num_tokens, dtype=np.int64) if self.at is None else self.at

    @property
    def active(self) -> bool:
        """Whether anything is wanted; an inactive request runs nothing."""
        return self.labels is not None or self.wants_dense

    @property
    def computes(self) -> bool:
        """Whether the model has to run for it: labels that are all ignored are zeros without it."""
        return self.num_trained > 0 or self.wants_dense

    def __repr__(self) -> str:
        parts = [f"{self.num_tokens} tokens"]
        if self.labels is not None:
            parts.append(f"{self.num_trained} scored")
        if self.wants_dense:
            kinds = [f"top-{self.top_k}"] * (self.top_k is not None) + ["logits"] * self.logits
            kinds += ["hidden states"] * self.hidden_states
            parts.append(f"{', '.join(kinds)} at {self.positions.size}")
        if self.weight != 1.0:
            parts.append(f"weight={self.weight}")
        if self.no_grad:
            parts.append("no_grad")
        if self.adapter is not None:
            parts.append(f"adapter={self.adapter!r}")
        return f"Request({', '.join(parts)})"


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


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
