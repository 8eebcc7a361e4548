"""Start-up check: a small tree must give the numbers of its requests run alone, gradients included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from trainer_rank.errors import SelfTestError
from trainer_rank.executor.run import run_forward
from trainer_rank.planner import pass_work
from trainer_rank.prefix import Layout
from trainer_rank.requests import Request
from trainer_rank.runtime import Runtime

# Largest |delta log-prob| and relative gradient error, by parameter dtype. A leak between branches or a cut from the
# prefix moves log-probs by whole units; rounding alone stays two orders of magnitude below these.
_TOLERANCE: Final = {"float64": (1e-6, 1e-4), "float32": (1e-3, 1e-2)}
_REDUCED: Final = (0.25, 0.25)


def self_test(runtime: Runtime, *, head_chunk_rows: int) -> None:
    """Run a tree of five requests packed and one by one, and compare log-probs and gradients.

    Gradients already accumulated are left as they are.

    Raises:
        SelfTestError: The two disagree; the message gives the differences.
    """
    requests = _requests(runtime.facts.vocabulary_size)
    packed, packed_grads = _run(runtime, requests, Layout.full_sharing(), head_chunk_rows)
    logprobs: list[Tensor] = []
    grads: list[Tensor] = [torch.zeros_like(grad) for grad in packed_grads]
    for request in requests:
        alone, alone_grads = _run(runtime, [request], Layout.no_sharing(), head_chunk_rows)
        logprobs += alone
        grads = [total + grad for total, grad in zip(grads, alone_grads, strict=True)]
    worst = max(float((a - b).abs().max()) for a, b in zip(packed, logprobs, strict=True))
    scale = max((float(grad.norm()) for grad in grads), default=0.0)
    off = max((float((a - b).norm()) for a, b in zip(packed_grads, grads, strict=True)), default=0.0)
    limit_logprob, limit_grad = _TOLERANCE.get(runtime.facts.dtype, _REDUCED)
    if not worst <= limit_logprob or not off <= limit_grad * scale:
        raise SelfTestError(
            f"packed and alone disagree on this backend: log-probs by {worst:.2e} (limit {limit_logprob:.0e}), "
            f"gradients by {off:.2e} of {scale:.2e} (limit {limit_grad:.0e} of it). Nothing was trained. "
            "Another attention implementation may have replaced the tree's: load the model without setting one"
        )


def _requests(vocabulary_size: int) -> list[Request]:
    """Branches at two depths, a request that ends inside the tree, and one that shares nothing."""
    draw = np.random.default_rng(0)
    root, branch, *ends = (draw.integers(0, vocabulary_size, size) for size in (9, 5, 4, 7, 3, 6))
    rows = [
        np.concatenate([root, branch, ends[0]]),
        np.concatenate([root, branch, ends[1]]),
        np.concatenate([root, branch]),
        np.concatenate([root, ends[2]]),
        ends[3],
    ]
    return [Request.next_token(row) for row in rows]


def _run(
    runtime: Runtime, requests: Sequence[Request], layout: Layout, head_chunk_rows: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the log-probs of the requests and the gradient of their sum."""
    parameters = runtime.trainable_parameters()
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        result = run_forward(
            runtime,
            pass_work(requests, range(len(requests)), layout),
            head_chunk_rows=head_chunk_rows,
            map_error=lambda error: error,
        )
        if parameters:
            torch.stack([logprobs.sum() for logprobs in result.logprobs]).sum().backward()
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    finally:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
    return [logprobs.detach() for logprobs in result.logprobs], grads
