"""What a caller's own loss needs, found by running it without data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from trainer_rank.errors import ConfigError
from trainer_rank.executor.recorder import AllocationRecorder
from trainer_rank.memory import fold
from trainer_rank.meters.simulated_device import paused
from trainer_rank.requests import Request
from trainer_rank.runtime import Runtime
from trainer_rank.session.micro_batch import MicroBatch, MicroBatchStats, Result, TopK

CallerLoss = Callable[[MicroBatch], Tensor]
"""A loss: a micro-batch in, a scalar with graph out."""

_META: Final = torch.device("meta")


def traced_bytes_per_token(loss: CallerLoss, requests: Sequence[Request], runtime: Runtime) -> int:
    """Return the most bytes per logical token that a loss and its backward allocate, over parts of the requests.

    Args:
        loss: Runs on ``meta`` tensors: it may not look at a value.
        requests: Examples with the payloads the loss reads, at least one of them active.
        runtime: The model whose outputs the loss reads; it does not run.

    Raises:
        ConfigError: No request is active, or the loss cannot run without data; the message names the operator.
    """
    active = [request for request in requests if request.active]
    if not active:
        raise ConfigError("requests must hold an active request to trace a loss with, got none that wants an output")
    most = 0
    for part in _parts(active):
        peak = _peak(loss, part, runtime)
        tokens = sum(request.num_tokens for request in part)
        most = max(most, -(-peak // tokens))
    return most


def _parts(requests: Sequence[Request]) -> Iterator[Sequence[Request]]:
    """Yield all requests, and each alone: the most bytes per token are either a fixed cost's or a sum's."""
    yield requests
    if len(requests) > 1:
        yield from ((request,) for request in requests)


def _peak(loss: CallerLoss, requests: Sequence[Request], runtime: Runtime) -> int:
    micro_batch = _stand_in(requests, runtime)
    recorder = AllocationRecorder(_META, runtime.stands_for)
    recorder.mark("loss")
    try:
        with paused(), recorder:
            value = loss(micro_batch)
            value.backward()
            del value
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"loss cannot be traced without data: {str(error).splitlines()[0]}. Keep what looks at values (item(), "
            "float(), boolean masks) out of the loss, or declare caller_bytes_per_token instead"
        ) from error
    return fold(recorder.trace(num_layers=0)).peak.peak_bytes


def _stand_in(requests: Sequence[Request], runtime: Runtime) -> MicroBatch:
    """Return a micro-batch whose outputs have shapes and no values."""
    results = [_result(request, runtime) for request in requests]
    tokens = sum(request.num_tokens for request in requests)
    return MicroBatch(
        inputs=list(requests),
        outputs=results,
        indices=tuple(range(len(requests))),
        requests=tuple(requests),
        results=tuple(results),
        coefficients=(1.0,) * len(requests),
        num_trained=sum(request.num_trained for request in requests),
        stats=MicroBatchStats(
            requests=len(requests), packed_rows=tokens, logical_tokens=tokens, trained_tokens=tokens, passes=1,
            required_bytes=0, predicted_peak_bytes=0, available_bytes=0, budget_bytes=0, resident_bytes=0,
        ),
    )  # fmt: skip


def _result(request: Request, runtime: Runtime) -> Result:
    rows, facts = int(request.positions.size), runtime.facts

    def empty(*shape: int, dtype: torch.dtype = runtime.logprob_dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=_META, requires_grad=not request.no_grad)

    model_dtype: torch.dtype = getattr(torch, facts.dtype)
    top = None
    if request.top_k is not None:
        ids = torch.empty((rows, request.top_k), dtype=torch.int64, device=_META)
        top = TopK(logprobs=empty(rows, request.top_k), ids=ids)
    return Result(
        logprobs=None if request.labels is None else empty(*request.labels.shape),
        top_k=top,
        logits=empty(rows, facts.vocabulary_size, dtype=model_dtype) if request.logits else None,
        hidden_states=empty(rows, facts.hidden_size, dtype=model_dtype) if request.hidden_states else None,
    )
