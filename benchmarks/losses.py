"""Every loss, under every normalisation and every split, gives the numbers of its formula.

The reference is written from the formulas by itself (``_naive_losses.py``): the library's own model, each request
alone, all logits, one token at a time. Models and float64 norms are those of ``exactness.py``.

Six requests that share prefixes, of different lengths, weights and numbers of trained tokens, are parted into
micro-batches in all 203 ways (``dpo``: its three pairs in all 5 ways). Micro-batches meet in sums only, so each
distinct one runs once, packed, through the loss as a training run calls it; a split's loss and gradient are the sums
of its micro-batches'.

Figures, for each loss and for the worst of all: ``loss_error`` and ``grad_error``, the largest relative difference of a
split from the reference (a gradient's by parameter); ``normalisation_error``, the largest relative difference of a
split's loss or gradient from those of the whole step in one micro-batch. ``clipped_above`` and ``clipped_below`` count
the tokens whose surrogate is clipped, so that the comparison is of every branch.
"""

from __future__ import annotations

from _harness import finish, pin_threads, quick, target

pin_threads(1)

import time  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from dataclasses import dataclass, replace  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from _naive_losses import TOKEN_LOSSES, clipped, over_pairs, over_tokens, token_logprobs  # noqa: E402
from _oracle import FAMILIES, Subject, make_subject, norms_in_float64  # noqa: E402
from _shapes import VOCABULARY  # noqa: E402
from _splits import Members, all_splits  # noqa: E402
from torch import Tensor  # noqa: E402

from trainer_rank import Layout, Request, Result, TransformersRuntime  # noqa: E402
from trainer_rank.executor.run import run_forward  # noqa: E402
from trainer_rank.planner import pass_work  # noqa: E402
from trainer_rank.requests import normaliser  # noqa: E402
from trainer_rank.training.config import LossSection  # noqa: E402
from trainer_rank.training.losses import Objective, objective_for  # noqa: E402
from trainer_rank.training.rollouts import Rollout  # noqa: E402

CUSTOM = f"{Path(__file__).resolve().parent / '_custom_loss.py'}:reinforce"
LOSSES: dict[str, dict[str, Any]] = {
    "sft": {}, "cispo": {}, "grpo": {"kl_coefficient": 0.1}, "ppo-clip": {}, "dpo": {}, "custom": {"function": CUSTOM}
}  # fmt: skip
NO_NUMBER = 1e9
"""What a figure shows that is not finite. It misses its target."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What a loss looks at."""

    requests: list[Request]
    results: list[Result]
    coefficients: list[float]


@dataclass(slots=True)
class Errors:
    """The worst of one loss."""

    loss: float = 0.0
    grad: float = 0.0
    normalisation: float = 0.0
    splits: int = 0


Numbers = tuple[float, list[Tensor]]
"""A loss and its gradient by parameter."""


def make_rollouts(subject: Subject, count: int) -> list[Rollout]:
    """Return rollouts that share prefixes, with old and reference log-probs around the model's own.

    The noise makes some tokens leave the clip's bounds on either side; one advantage is 0, every second request has
    one advantage per token, and neighbours are pairs.
    """
    draw = np.random.default_rng(7)
    system, asked = draw.integers(0, VOCABULARY, 5), [draw.integers(0, VOCABULARY, 3) for _ in range(2)]
    rollouts = []
    for number in range(count):
        tail = draw.integers(0, VOCABULARY, int(draw.integers(2, 8)))
        tokens = np.concatenate([system, asked[number // 2 % 2], tail]).astype(np.int64)
        trained = np.arange(len(tokens)) >= len(tokens) - len(tail)
        trained[-1] &= number % 3 != 1 or len(tail) < 3
        blank = Rollout(
            tokens=tokens, trained=trained, group=str(number // 2), weight=(1.0, 0.5, 2.0)[number // 2 % 3],
            line=number, advantage=None, old_logprobs=None, reward=float(draw.normal()),
            chosen=number % 2 == number // 2 % 2,
        )  # fmt: skip
        own = np.zeros(len(tokens))
        with torch.no_grad():
            for t, logp in token_logprobs(subject.oracle, blank).items():
                own[t] = float(logp)
        old, reference = (np.minimum(own + draw.normal(0, 0.5, len(own)), 0).astype(np.float32) for _ in range(2))
        per_token = draw.normal(size=len(tokens)).astype(np.float32)
        rollouts.append(
            replace(
                blank,
                old_logprobs=old,
                ref_logprobs=reference,
                advantage=None if number % 2 else (0.0 if number == 2 else float(draw.normal())),
                advantages=per_token if number % 2 else None,
            )
        )
    return rollouts


def wanted(subject: Subject, rollouts: Sequence[Rollout], name: str, normalisation: str) -> Numbers:
    """Return the reference's numbers."""
    parameters = [parameter for parameter in subject.oracle.parameters() if parameter.requires_grad]
    if name == "dpo":
        loss = over_pairs(subject.oracle, rollouts, normalisation)
    else:
        loss = over_tokens(subject.oracle, rollouts, TOKEN_LOSSES[name], normalisation)
    return float(loss.detach()), list(torch.autograd.grad(loss, parameters))


def run(
    runtime: TransformersRuntime,
    objective: Objective,
    requests: Sequence[Request],
    coefficients: Sequence[float],
    members: Members,
) -> Numbers:
    """Return the numbers of one micro-batch."""
    parameters = runtime.trainable_parameters()
    for parameter in parameters:
        parameter.grad = None
    work = pass_work([requests[index] for index in members], members, Layout.full_sharing())
    logprobs = run_forward(runtime, work, head_chunk_rows=7, map_error=lambda error: error).logprobs
    micro_batch: Any = MicroBatch(
        requests=[requests[index] for index in members],
        results=[Result(logprobs=one) for one in logprobs],
        coefficients=[coefficients[index] for index in members],
    )
    loss = objective.checked(objective.loss(micro_batch), micro_batch, step=1)
    loss.backward()
    return float(loss.detach()), [parameter.grad.clone() for parameter in parameters]


def added(parts: Sequence[Numbers]) -> Numbers:
    """Return the sums of the micro-batches of a split."""
    return sum(loss for loss, _ in parts), [
        torch.stack(each).sum(0) for each in zip(*(g for _, g in parts), strict=True)
    ]


def distance(found: Numbers, other: Numbers) -> tuple[float, float]:
    """Return the relative differences of loss and gradient, the latter of the worst parameter."""
    norms = torch.stack([grad.norm() for grad in other[1]])
    # A parameter whose gradient is zero but for rounding is held against the whole gradient.
    scale = torch.where(norms <= 64 * torch.finfo(norms.dtype).eps * norms.norm(), norms.norm(), norms)
    off = torch.stack([(one - two).norm() for one, two in zip(found[1], other[1], strict=True)]) / scale
    pair = np.asarray([abs(found[0] - other[0]) / abs(other[0]), float(off.max())])
    loss, grad = np.nan_to_num(pair, nan=NO_NUMBER, posinf=NO_NUMBER).tolist()
    return loss, grad


def check(subject: Subject, rollouts: Sequence[Rollout], name: str, normalisation: str, errors: Errors) -> None:
    """Run every split of one loss under one normalisation."""
    section = LossSection.model_validate({"name": name, "normalisation": normalisation, **LOSSES[name]})
    objective, runtime = objective_for(section), subject.runtime("full")
    requests = [
        Request.next_token(one.tokens, trained=one.trained, weight=one.weight, payload=objective.payload(one))
        for one in rollouts
    ]
    coefficients, known = (
        normaliser(requests, normalisation).coefficients,
        wanted(subject, rollouts, name, normalisation),
    )
    size = 2 if name == "dpo" else 1
    units = tuple(range(len(requests) // size))
    splits = list(all_splits(units))
    ran: dict[Members, Numbers] = {}
    for part in dict.fromkeys(part for split in splits for part in split):
        members = tuple(size * unit + one for unit in part for one in range(size))
        ran[part] = run(runtime, objective, requests, coefficients, members)
    for split in splits:
        found = added([ran[part] for part in split])
        loss, grad = distance(found, known)
        errors.loss, errors.grad = max(errors.loss, loss), max(errors.grad, grad)
        errors.normalisation = max(errors.normalisation, *distance(found, ran[units]))
        errors.splits += 1


def main() -> None:
    """Run everything; with ``--quick`` one model family and four requests."""
    begin, families, count = time.perf_counter(), FAMILIES[:1] if quick() else FAMILIES, 4 if quick() else 6
    worst, above, below = {name: Errors() for name in LOSSES}, 0, 0
    with norms_in_float64():
        for family in families:
            subject = make_subject(family, "adapter", torch.float64)
            rollouts = make_rollouts(subject, count)
            counts = clipped(subject.oracle, rollouts)
            above, below = above + counts[0], below + counts[1]
            for name, errors in worst.items():
                kinds = ("sequence-mean", "sum") if name == "dpo" else ("token-mean", "sequence-mean", "sum")
                for normalisation in kinds:
                    check(subject, rollouts, name, normalisation, errors)
            print(f"{family}: {time.perf_counter() - begin:.0f} s", flush=True)
    print("\nloss      splits     loss  gradient  normalisation")
    figures: dict[str, float] = {
        "splits": sum(errors.splits for errors in worst.values()), "clipped_above": above, "clipped_below": below
    }  # fmt: skip
    for name, errors in worst.items():
        print(f"{name:8} {errors.splits:7}  {errors.loss:7.1e}  {errors.grad:8.1e}  {errors.normalisation:13.1e}")
        for key in ("loss", "grad", "normalisation"):
            figures[f"{name.replace('-', '_')}_{key}_error"] = getattr(errors, key)
    bounds = {"loss": 1e-6, "grad": 1e-6, "normalisation": 1e-9}
    for key in bounds:
        figures[f"{key}_error"] = max(getattr(errors, key) for errors in worst.values())
    reached = [target(key, "ge", 1) for key in ("clipped_above", "clipped_below")]
    finish("losses", figures, [*(target(f"{key}_error", "le", at) for key, at in bounds.items()), *reached])


if __name__ == "__main__":
    main()
