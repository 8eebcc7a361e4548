"""Loss normalisation over a whole batch, fixed before the batch is split.

With c_i the coefficient of request i, the normalised loss is ``sum_i c_i * sum_t loss_it`` whatever the passes:

    token-mean      c_i = w_i / sum_j w_j n_j        a token counts the same wherever it stands
    sequence-mean   c_i = w_i / (n_i sum_j w_j)      a sequence counts the same whatever its length
    sum             c_i = w_i

n_i is the number of scored labels and w_i the request's weight. Requests that score nothing count in no denominator.
A mean of per-micro-batch means would depend on the split (the classic gradient-accumulation fault); a coefficient does
not. When nothing is scored at all, every coefficient is 0.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from trainer_rank.errors import RequestError
from trainer_rank.requests.request import Request

Normalisation = Literal["token-mean", "sequence-mean", "sum"]
NORMALISATIONS: Final[tuple[str, ...]] = get_args(Normalisation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Normaliser:
    """Per-request loss coefficients of one batch.

    Attributes:
        kind: The rule they follow.
        coefficients: One per request in flat order.
        num_trained: Scored labels in the whole batch; 0 means that loss and gradient are exactly 0.
    """

    kind: str
    coefficients: tuple[float, ...]
    num_trained: int


def normaliser(requests: Sequence[Request], kind: str = "token-mean", *, left_out: Collection[int] = ()) -> Normaliser:
    """Return the coefficients of a batch; requests left out, by flat index, count as if they were not in it.

    Raises:
        RequestError: Unknown ``kind``.
    """
    if kind not in NORMALISATIONS:
        raise RequestError(
            f"normalisation must be one of {', '.join(NORMALISATIONS)}, got {kind!r}", field="normalisation"
        )
    counts = [0 if index in left_out else request.num_trained for index, request in enumerate(requests)]
    trained = [(request.weight, count) for request, count in zip(requests, counts, strict=True) if count]
    if kind == "token-mean":
        total = sum(weight * count for weight, count in trained)
    elif kind == "sequence-mean":
        total = sum(weight for weight, _ in trained)
    else:
        total = 1.0
    coefficients = []
    for request, count in zip(requests, counts, strict=True):
        if not count or not total:
            coefficients.append(0.0)
        elif kind == "sequence-mean":
            coefficients.append(request.weight / (count * total))
        else:
            coefficients.append(request.weight / total)
    return Normaliser(kind=kind, coefficients=tuple(coefficients), num_trained=sum(counts))
