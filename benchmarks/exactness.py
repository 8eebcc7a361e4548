"""Every layout and every split gives the numbers of the stock library model run one request at a time.

The oracle is the library's own model with its own ``sdpa`` attention, each request alone, log-softmax over all rows.
The loss sums log-probs with random weights, so that no gradient is symmetric. Llama, Qwen2 and Qwen3 with random
weights and grouped-query heads, an adapter or all weights trained, recompute on and off, make twelve ways to train.

* Shapes of at most four layout decisions and six requests: all layouts of all splits into passes, in one way of each
  family, the four of a family in turn. Passes meet only in ``.grad``, to which they add, so each distinct pass (some of
  the requests under some layout) runs once; the error of a split is at most the sum of the errors of its passes, and
  that sum is judged.
* All shapes: random splits with random layouts, ``.grad`` accumulating over the passes of a split; 32 for a shape that
  is not small, dealt out over the twelve ways, and one in each way for a small one.
* All shapes again as mixed batches (``_mixed``): every kind of output, grad modes, and two adapters and none at once.
* SmolLM2-135M on chat text, log-probs only.

Figures: ``float64_*`` in float64 with a float64 RMSNorm on both sides (the stock one computes in float32);
``float32_*`` as the library ships it. ``*_logp`` is the largest absolute difference of a log-prob; ``*_grad`` the norm
of the difference over the norm of the reference, for the worst single parameter (over the norm of the whole gradient
for a parameter whose reference is zero). ``*_outputs`` and ``*_outputs_grad`` are the same of the mixed batches, where
an output may also be a logit or an element of a hidden state, and a parameter with less than a thousandth of the whole
gradient's norm is judged against that thousandth: short requests leave keys and queries with differences that cancel.
``*_outputs_grad_own`` is the same without that allowance, and has no target.
"""

from __future__ import annotations

from _harness import finish, pin_threads, quick, target

pin_threads(1)

import contextlib  # noqa: E402
import itertools  # noqa: E402
import math  # noqa: E402
import time  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from _chat import chat_trees  # noqa: E402
from _mixed import Errors, check_mixed, mixed_subject  # noqa: E402
from _oracle import (  # noqa: E402
    FAMILIES,
    RECOMPUTE,
    TRAINED,
    WAYS,
    Reference,
    Subject,
    Way,
    alone,
    make_subject,
    norms_in_float64,
    reference,
)
from _shapes import Shape, requests, shapes  # noqa: E402
from _splits import Members, Pass, all_passes, all_splits, is_small, random_split  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from trainer_rank import Layout, Request, TransformersRuntime  # noqa: E402
from trainer_rank.executor.run import run_forward  # noqa: E402
from trainer_rank.planner import pass_work  # noqa: E402

SAMPLES = 32
REAL_MODEL = Path(__file__).resolve().parents[1] / ".cache" / "smollm2-135m"
NO_NUMBER = 1e9
"""What a figure shows that could not be had: not finite, or not run. It misses its target."""


@dataclass(slots=True)
class Worst:
    """The worst errors of one way and where they were, with the passes run and the combinations they stand for."""

    logp: float = 0.0
    grad: float = 0.0
    logp_at: str = ""
    grad_at: str = ""
    passes: int = 0
    combinations: int = 0

    def meet_logp(self, error: float, where: str) -> None:
        """Take in an error; one that is not a number is the worst of all."""
        if not error <= self.logp:
            self.logp, self.logp_at = min(error, NO_NUMBER) if error == error else NO_NUMBER, where

    def meet_grad(self, error: float, where: str) -> None:
        """The same for a gradient."""
        if not error <= self.grad:
            self.grad, self.grad_at = min(error, NO_NUMBER) if error == error else NO_NUMBER, where


@dataclass(frozen=True, slots=True)
class Case:
    """A shape as requests, with a weight for each label."""

    name: str
    batch: list[Request]
    weights: list[Tensor]
    small: bool


@dataclass(frozen=True, slots=True)
class Trial:
    """A case with what the oracle says of it."""

    case: Case
    known: Reference
    names: list[str]


def make_case(shape: Shape, seed: int, dtype: torch.dtype) -> Case:
    """Return the shape's requests and random weights."""
    draw = np.random.default_rng(seed)
    batch = requests(shape, draw)
    weights = [torch.from_numpy(draw.normal(size=np.shape(request.labels))).to(dtype) for request in batch]
    return Case(shape.name, batch, weights, is_small(batch))


def run(runtime: TransformersRuntime, trial: Trial, passes: Sequence[Pass]) -> tuple[float, Tensor]:
    """Return the errors of a split: of the worst log-prob, and of each parameter's gradient relative to its scale."""
    case, known, parameters = trial.case, trial.known, runtime.trainable_parameters()
    for parameter in parameters:
        parameter.grad = None
    logp, members = [], []
    for indices, layout in passes:
        work = pass_work([case.batch[index] for index in indices], indices, layout)
        result = run_forward(runtime, work, head_chunk_rows=7, map_error=lambda error: error)
        pairs = list(zip(indices, result.logprobs, strict=True))
        logp += [float((known.logprobs[index] - found.detach()).abs().max()) for index, found in pairs]
        torch.stack([(case.weights[index] * found).sum() for index, found in pairs]).sum().backward()
        members += indices
    wanted = [torch.stack(grads).sum(0) for grads in zip(*(known.grads[index] for index in members), strict=True)]
    grads = [parameter.grad for parameter in parameters]
    off = torch.stack(torch._foreach_norm(torch._foreach_sub(grads, wanted)))
    # Python's ``max`` would let NaN pass.
    return float(np.max(logp)), off.double() / known.scale


def check_all(runtime: TransformersRuntime, trial: Trial, worst: Worst) -> None:
    """Run every layout of every split."""
    name, batch = trial.case.name, trial.case.batch
    everyone = tuple(range(len(batch)))
    errors: dict[Members, Tensor] = {}
    layouts: dict[Members, int] = {}
    for size in range(1, len(everyone) + 1):
        for members in itertools.combinations(everyone, size):
            passes, layouts[members] = all_passes(batch, members)
            found = [run(runtime, trial, [item]) for item in passes]
            for item, (logp, _) in zip(passes, found, strict=True):
                worst.meet_logp(logp, f"{name} {item}")
            errors[members] = torch.stack([off for _, off in found]).amax(0)
            worst.passes += len(passes)
    for split in all_splits(everyone):
        off = torch.stack([errors[members] for members in split]).sum(0)
        worst.meet_grad(float(off.max()), f"{name} {split} {trial.names[int(off.argmax())]}")
        worst.combinations += math.prod(layouts[members] for members in split)


def check_one(runtime: TransformersRuntime, trial: Trial, split: Sequence[Pass], worst: Worst) -> None:
    """Run one split."""
    logp, off = run(runtime, trial, split)
    worst.meet_logp(logp, f"{trial.case.name} {split}")
    worst.meet_grad(float(off.max()), f"{trial.case.name} {split} {trial.names[int(off.argmax())]}")
    worst.passes += len(split)
    worst.combinations += 1


def check_shape(subject: Subject, ways: Sequence[Way], case: Case, number: int, worst: dict[Way, Worst]) -> None:
    """Run what falls to the ways of one subject (recompute on, off) of the case with this number."""
    trial = Trial(case, reference(subject, case.batch, case.weights), subject.parameter_names())
    for way in ways:
        runtime, place = subject.runtime(way.recompute), (WAYS.index(way) + number) % len(WAYS)
        if case.small and place % (len(TRAINED) * len(RECOMPUTE)) == 0:
            check_all(runtime, trial, worst[way])
        for sample in [place] if case.small else range(place, SAMPLES, len(WAYS)):
            split = random_split(case.batch, np.random.default_rng((number, sample)))
            check_one(runtime, trial, split, worst[way])


def check_tiny(drawn: Sequence[Shape], dtype: torch.dtype) -> dict[str, float]:
    """Run all shapes in all ways, print a table, return its worst figures."""
    name = str(dtype).removeprefix("torch.")
    worst = {way: Worst() for way in WAYS}
    cases = [make_case(shape, number, dtype) for number, shape in enumerate(drawn)]
    for family, trained in itertools.product(FAMILIES, TRAINED):
        begin = time.perf_counter()
        subject = make_subject(family, trained, dtype)
        ways = [Way(family, trained, recompute) for recompute in RECOMPUTE]
        for number, case in enumerate(cases):
            check_shape(subject, ways, case, number, worst)
        print(f"{name} {family} {trained}: {len(cases)} shapes in {time.perf_counter() - begin:.0f} s", flush=True)
    print(f"\n{name:38} log-prob  gradient  passes  combinations")
    for way, found in worst.items():
        print(f"{way!s:38} {found.logp:8.1e}  {found.grad:8.1e}  {found.passes:6}  {found.combinations:12}")
    logp, grad = (max(worst.values(), key=lambda found: getattr(found, key)) for key in ("logp", "grad"))
    print(f"worst log-prob at {logp.logp_at}\nworst gradient at {grad.grad_at}\n", flush=True)
    return {
        f"{name}_logp": logp.logp,
        f"{name}_grad": grad.grad,
        f"{name}_passes": sum(found.passes for found in worst.values()),
        f"{name}_combinations": sum(found.combinations for found in worst.values()),
    }


def check_all_outputs(drawn: Sequence[Shape], dtype: torch.dtype) -> dict[str, float]:
    """Run all shapes as mixed batches, in one way of each family, and return the worst figures."""
    name, errors, begin = str(dtype).removeprefix("torch."), Errors(), time.perf_counter()
    ways = list(itertools.product(TRAINED, RECOMPUTE))
    for turn, family in enumerate(FAMILIES):
        for trained in TRAINED:
            subject = mixed_subject(family, trained, dtype)
            for number, shape in enumerate(drawn):
                kind, recompute = ways[(number + turn) % len(ways)]
                if kind == trained:
                    check_mixed(subject, trained, recompute, shape, number, errors)
    print(
        f"{name} mixed batches: outputs {errors.outputs:.1e}, gradient {errors.gradient:.1e}, {errors.passes} passes "
        f"in {time.perf_counter() - begin:.0f} s\n",
        flush=True,
    )
    return {
        f"{name}_outputs": errors.outputs,
        f"{name}_outputs_grad": errors.gradient,
        f"{name}_outputs_grad_own": errors.own,
        f"{name}_outputs_passes": errors.passes,
    }


def check_real() -> dict[str, float]:
    """Run SmolLM2-135M on chat trees and return the worst difference of a log-prob."""
    if not (REAL_MODEL / "config.json").is_file():
        print("SmolLM2-135M is missing, so real_logp is missed; make it by: python examples/demo/prepare_model.py")
        return {"real_logp": NO_NUMBER, "real_trees": 0}
    oracle = AutoModelForCausalLM.from_pretrained(REAL_MODEL, dtype=torch.float32, attn_implementation="sdpa").eval()
    runtime = TransformersRuntime.from_pretrained(REAL_MODEL, dtype=torch.float32)
    trees = chat_trees(AutoTokenizer.from_pretrained(REAL_MODEL))
    worst = 0.0
    for number, (name, rows) in enumerate(trees.items()):
        draw, begin = np.random.default_rng(number), time.perf_counter()
        batch = [Request.next_token(row, no_grad=True) for row in rows]
        with torch.no_grad():
            known = [alone(oracle, request) for request in batch]
        half = tuple(range(0, len(batch), 2)), tuple(range(1, len(batch), 2))
        splits: list[list[Pass]] = [
            [(tuple(range(len(batch))), Layout.full_sharing())],
            [(members, Layout.uniform_depth(1)) for members in half],
            random_split(batch, draw),
        ]
        errors = []
        for indices, layout in itertools.chain.from_iterable(splits):
            work = pass_work([batch[index] for index in indices], indices, layout)
            result = run_forward(runtime, work, head_chunk_rows=64, map_error=lambda error: error)
            errors += [
                float((known[index] - found).abs().max()) for index, found in zip(indices, result.logprobs, strict=True)
            ]
        error = min(float(np.nan_to_num(np.max(errors), nan=NO_NUMBER)), NO_NUMBER)
        worst = max(worst, error)
        tokens, span = sum(len(row) for row in rows), max(len(row) for row in rows)
        print(
            f"SmolLM2-135M {name:24} {len(rows):2} requests, {tokens:4} tokens, longest {span:3}: "
            f"log-prob {error:.1e}  ({time.perf_counter() - begin:.0f} s)",
            flush=True,
        )
    return {"real_logp": worst, "real_trees": len(trees)}


def main() -> None:
    """Run everything; with ``--quick`` a few shapes and no real model."""
    begin = time.perf_counter()
    drawn = shapes()[::22] if quick() else shapes()
    figures: dict[str, float] = {"shapes": len(drawn)}
    for dtype, norms in ((torch.float64, norms_in_float64()), (torch.float32, contextlib.nullcontext())):
        with norms:
            figures |= check_tiny(drawn, dtype)
            figures |= check_all_outputs(drawn, dtype)
    if not quick():
        figures |= check_real()
    print(f"{time.perf_counter() - begin:.0f} s in all")
    bounds = {
        "float64_outputs": 1e-9, "float64_outputs_grad": 1e-9, "float32_outputs": 1e-4, "float32_outputs_grad": 1e-4,
    }  # fmt: skip
    bounds |= {
        "float64_logp": 1e-9,
        "float64_grad": 1e-9,
        "float32_logp": 1e-4,
        "float32_grad": 1e-4,
        "real_logp": 1e-4,
    }
    finish("exactness", figures, [target("shapes", "ge", 60), *(target(key, "le", at) for key, at in bounds.items())])


if __name__ == "__main__":
    main()
