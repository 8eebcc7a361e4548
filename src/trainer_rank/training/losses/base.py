"""What a loss sees of a micro-batch, and what every loss needs to read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer_rank.requests import IGNORED
from trainer_rank.training.rollouts import Rollout


class ScoredRequest(Protocol):
    """A request as a loss sees it; ``labels`` and ``num_trained`` as in ``Request``."""

    @property
    def payload(self) -> object: ...

    @property
    def labels(self) -> npt.NDArray[np.int64] | None: ...

    @property
    def num_trained(self) -> int: ...


class Scores(Protocol):
    """What came back for a request: ``logprobs`` float32 (N,), 0 at positions that are not scored; None if inactive."""

    @property
    def logprobs(self) -> Tensor | None: ...


class ScoredBatch(Protocol):
    """A micro-batch as a loss sees it; the three lists are aligned."""

    @property
    def requests(self) -> Sequence[ScoredRequest]: ...

    @property
    def results(self) -> Sequence[Scores]: ...

    @property
    def coefficients(self) -> Sequence[float]: ...


Loss = Callable[[ScoredBatch], Tensor]


def scored_rows(micro_batch: ScoredBatch) -> Iterator[tuple[float, ScoredRequest, Tensor]]:
    """Yield coefficient, request and log-probs of every active request."""
    for coefficient, request, result in zip(
        micro_batch.coefficients, micro_batch.requests, micro_batch.results, strict=True
    ):
        if result.logprobs is not None:
            yield coefficient, request, result.logprobs


def scored_mask(request: ScoredRequest) -> npt.NDArray[np.bool_]:
    """Return where a request is scored: bool, of its labels' shape."""
    assert request.labels is not None, "an inactive request has no log-probs"
    mask: npt.NDArray[np.bool_] = request.labels != IGNORED
    return mask


def by_position(rollout: Rollout, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return values per token as values per scoring position.

    Args:
        rollout: Its ``trained`` says which tokens are scored.
        values: float32 (N,), entry t belongs to token t.

    Returns:
        float32 (N,), entry i belongs to token i + 1, which position i scores; 0 where nothing is scored.
    """
    result = np.zeros_like(values)
    result[:-1] = np.where(rollout.trained, values, 0.0)[1:]
    return result


def like(values: Any, logprobs: Tensor) -> Tensor:
    """Return a number or a (N,) array as a tensor of the log-probs' device, dtype and shape, without graph.

    Raises:
        ValueError: An array of another shape.
    """
    if isinstance(values, int | float):
        return torch.full_like(logprobs.detach(), values)
    found = torch.as_tensor(values, device=logprobs.device, dtype=logprobs.dtype)
    if found.shape != logprobs.shape:
        raise ValueError(
            f"payload: must hold one entry per position, {tuple(logprobs.shape)}, got {tuple(found.shape)}"
        )
    return found
