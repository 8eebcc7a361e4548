"""Direct preference optimisation over pairs of a chosen and a rejected sequence.

    - sum_p w_p logsigmoid(beta ((logp_c - ref_c) - (logp_r - ref_r)))

logp and ref are sums of log-probabilities over a sequence's trained tokens. Source: arXiv 2305.18290, eq. 7.

A pair counts as one, so its weight must be w / sum_q w_q for ``sequence-mean`` (the mean over pairs) and w for ``sum``,
w being the weight that both members carry. The coefficients of requests give exactly that. They are fixed over the
whole step, before it is split, with n_i the trained tokens of request i and W the sum of all weights:

    sequence-mean   c_i = w_i / (n_i W), and W = 2 sum_q w_q, for each pair brings its weight twice. So c_i n_i = w / W
                    for both members, and c_c n_c + c_r n_r = 2 w / W = w / sum_q w_q.
    sum             c_i = w_i, and (c_c + c_r) / 2 = w.

``token-mean`` has no such reading: a pair's term is no sum over tokens. A pair in which nothing is trained has two
coefficients of 0 and counts nowhere.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from trainer_rank.errors import RequestError
from trainer_rank.requests import AtomicGroup, Request
from trainer_rank.training.loss_options import LOSSES
from trainer_rank.training.losses.base import ScoredBatch, ScoredRequest, by_position, scored_mask, scored_rows
from trainer_rank.training.rollouts import Rollout

BETA: Final[float] = LOSSES["dpo"]["beta"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Preference:
    """One member of a pair, carried as its payload for ``dpo``.

    Attributes:
        pair: What its two members have in common, and no other request of the step.
        chosen: Whether this is the preferred member.
        ref_logprobs: float32 (N,), aligned with the *positions* that score: the log-probabilities under the
            reference model; None until they are known.
    """

    pair: Hashable
    chosen: bool
    ref_logprobs: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredPair:
    """A pair whose both members were scored.

    Attributes:
        weight: Its factor in the loss.
        chosen, rejected: Log-probability under the model less that under the reference, of the whole sequence;
            scalars with graph.
    """

    weight: float
    chosen: Tensor
    rejected: Tensor


def preference(rollout: Rollout) -> Preference | None:
    """Return the payload of a rollout; None when it does not say whether it was chosen."""
    if rollout.chosen is None:
        return None
    reference = rollout.ref_logprobs
    return Preference(
        pair=(rollout.group, rollout.pair),
        chosen=rollout.chosen,
        ref_logprobs=None if reference is None else by_position(rollout, reference),
    )


def keep_pairs(requests: Sequence[Request]) -> list[Any]:
    """Return a nest in which the members of each pair stay in one micro-batch; other requests stay as they are.

    A pair that comes several times in a step (when a step is longer than the data) is paired copy by copy.

    Raises:
        RequestError: A pair lacks a member.
    """
    members: dict[Hashable, tuple[list[Request], list[Request]]] = {}
    for request in requests:
        if isinstance(request.payload, Preference):
            both = members.setdefault(request.payload.pair, ([], []))
            both[0 if request.payload.chosen else 1].append(request)
    for pair, (chosen, rejected) in members.items():
        if len(chosen) != len(rejected):
            raise _incomplete(pair, len(chosen), len(rejected))
    nest: list[Any] = []
    for request in requests:
        if not isinstance(request.payload, Preference):
            nest.append(request)
        elif request.payload.chosen:
            nest.append(AtomicGroup([request, members[request.payload.pair][1].pop(0)]))
    return nest


def dpo(micro_batch: ScoredBatch, *, beta: float = BETA, normalisation: str = "sequence-mean") -> Tensor:
    """Return the loss of the pairs of a micro-batch, a scalar with graph; exactly 0 when nothing is scored.

    Every request's payload must be a ``Preference`` with ``ref_logprobs``, and both members of a pair must be there.

    Args:
        beta: How strongly the reference holds the model back; in units of one over log-probability.
        normalisation: The rule behind the coefficients: ``sequence-mean`` or ``sum``.

    Raises:
        TypeError: A payload is something else, or lacks the reference.
        RequestError: A pair is cut, or only one of its members has trained tokens.
        ValueError: Another normalisation.
    """
    terms = [
        -pair.weight * logsigmoid(beta * (pair.chosen - pair.rejected))
        for pair in scored_pairs(micro_batch, normalisation)
    ]
    return torch.stack(terms).sum()


def scored_pairs(micro_batch: ScoredBatch, normalisation: str) -> Iterator[ScoredPair]:
    """Yield the pairs of a micro-batch.

    Raises:
        TypeError, RequestError, ValueError: As ``dpo``.
    """
    if normalisation not in ("sequence-mean", "sum"):
        raise ValueError(f"normalisation must be sequence-mean or sum for dpo, got {normalisation!r}")
    members: dict[Hashable, tuple[list[_Member], list[_Member]]] = {}
    for coefficient, request, logprobs in scored_rows(micro_batch):
        payload = request.payload
        if not isinstance(payload, Preference):
            raise TypeError(f"dpo needs a Preference as the request's payload, got {type(payload).__name__}")
        both = members.setdefault(payload.pair, ([], []))
        both[0 if payload.chosen else 1].append(_member(coefficient, request, payload, logprobs, normalisation))
    for pair, (chosen, rejected) in members.items():
        if len(chosen) != len(rejected):
            raise _incomplete(pair, len(chosen), len(rejected))
        for one, other in zip(chosen, rejected, strict=True):
            if bool(one.num_trained) != bool(other.num_trained):
                raise RequestError(
                    f"pair {pair!r}: both members must have trained tokens, got {one.num_trained} in the chosen and "
                    f"{other.num_trained} in the rejected one",
                    field="labels",
                )
            yield ScoredPair(weight=one.share + other.share, chosen=one.gain, rejected=other.gain)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Member:
    """What a request brings to its pair: its share of the weight, and logp - ref, a scalar with graph."""

    share: float
    gain: Tensor
    num_trained: int


def _member(
    coefficient: float, request: ScoredRequest, payload: Preference, logprobs: Tensor, normalisation: str
) -> _Member:
    reference = payload.ref_logprobs
    if reference is None:
        raise TypeError(
            "dpo needs ref_logprobs in the payload, got None; write them into the data, or set reference to adapter-off"
        )
    scored = scored_mask(request)
    if reference.shape != scored.shape:
        raise ValueError(f"payload: ref_logprobs must have the labels' shape {scored.shape}, got {reference.shape}")
    share = coefficient * request.num_trained if normalisation == "sequence-mean" else coefficient / 2
    return _Member(
        share=share,
        gain=logprobs.sum() - float(reference[scored].sum(dtype=np.float64)),
        num_trained=request.num_trained,
    )


def _incomplete(pair: Hashable, chosen: int, rejected: int) -> RequestError:
    return RequestError(
        f"pair {pair!r}: must have as many chosen as rejected members in one micro-batch, got {chosen} and {rejected}; "
        "put both into one AtomicGroup",
        field="payload",
    )
