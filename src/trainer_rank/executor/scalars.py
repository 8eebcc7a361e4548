"""What autograd keeps beside the device's tensors: the scale of every adapted projection.

It is a scalar on the CPU wherever the model is, so a trace on ``meta`` does not see it and a GPU need not hold it. On a
CPU that counts every byte a price without it is short by it: 8 bytes for each projection of each layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from trainer_rank.memory import Price, Term
from trainer_rank.planner import PassWork
from trainer_rank.runtime import Runtime

SCALAR_BYTES: Final = 8
"""Of a Python number that takes part in a product: a float64."""


def with_scalars(price: Price, runtime: Runtime, work: PassWork) -> Price:
    """Return the price of a pass with these scalars; all of them, as without recompute all are kept."""
    if work.no_grad or runtime.facts.adapter is None or runtime.stands_for.type != "cpu":
        return price
    # An adapter has two matrices per projection.
    num_bytes = SCALAR_BYTES * (len(runtime.parameters_of(work.adapter)) // 2)
    return replace(
        price,
        required_bytes=price.required_bytes + num_bytes,
        retained_bytes=price.retained_bytes + num_bytes,
        terms=(*price.terms, Term(name="scales of adapters", num_bytes=num_bytes)),
    )
