"""Log-probabilities under the reference model: the same weights with the adapter off."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trainer_rank.requests import BASE, Request
from trainer_rank.session import TrainerRank
from trainer_rank.training.losses.dpo import Preference
from trainer_rank.training.losses.policy import Sampled


def reference_logprobs(rank: TrainerRank, requests: Sequence[Request]) -> list[npt.NDArray[np.float32]]:
    """Return the log-probabilities of every request's labels with the adapter off, computed without a graph.

    Returns:
        One float32 array of the labels' shape per request, by position, 0 where nothing is scored; the shape of the
        tokens for a request without labels.

    Raises:
        RequestError: The rank has no adapter to turn off.
        TrainerRankMemoryError: A request cannot fit.
    """
    result = [np.zeros((one.tokens if one.labels is None else one.labels).shape, np.float32) for one in requests]
    # What scores nothing needs no forward.
    wanted = [index for index, request in enumerate(requests) if request.num_trained]
    twins = [dataclasses.replace(requests[index], no_grad=True, adapter=BASE, payload=None) for index in wanted]
    if not twins:
        return result
    for micro_batch in rank.forward_micro_batches(twins, normalisation="sum"):
        for index, scored in zip(micro_batch.indices, micro_batch.results, strict=True):
            assert scored.logprobs is not None, "a request with labels is scored"
            result[wanted[index]] = scored.logprobs.detach().float().cpu().numpy()
        # What is still referred to here would be charged to the next pass.
        del micro_batch, scored
    return result


def with_references(rank: TrainerRank, requests: Sequence[Request]) -> list[Request]:
    """Return the requests with ``ref_logprobs`` in their payloads, in the same order.

    Raises:
        TypeError: A payload has no place for them.
    """
    result = []
    for request, reference in zip(requests, reference_logprobs(rank, requests), strict=True):
        if not isinstance(request.payload, Preference | Sampled):
            raise TypeError(f"a payload with ref_logprobs is needed, got {type(request.payload).__name__}")
        payload = dataclasses.replace(request.payload, ref_logprobs=reference)
        result.append(dataclasses.replace(request, payload=payload))
    return result
