"""The exactness benchmark's mixed batches: every kind of output, grad modes and adapters at once.

Each request of a shape wants something of its own, drawn at random: labels one or three wide, ranked tokens, logits,
hidden states or several of these, at all positions or some; some without gradients. Where adapters are trained there
are two, and some of the ungraded requests run without any. Passes are split at random and by what may share one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from _oracle import Subject, make_subject
from _shapes import VOCABULARY, Shape, requests
from _splits import Pass, random_split
from peft import LoraConfig, PeftModel
from torch import Tensor

from trainer_rank import BASE, Request, TransformersRuntime
from trainer_rank.executor.run import Outputs, run_forward
from trainer_rank.planner import pass_work
from trainer_rank.requests import IGNORED

SECOND = "second"


@dataclass(slots=True)
class Errors:
    """Worst differences: of an output's element, of a parameter's gradient relative to its scale, and to its own norm.

    ``own`` makes no allowance for gradients that cancel, but for those that are zero but for rounding.
    """

    outputs: float = 0.0
    gradient: float = 0.0
    own: float = 0.0
    passes: int = 0

    def meet(self, outputs: float, gradient: tuple[float, float]) -> None:
        """Take in the errors of a split; what is not a number is worst of all."""
        self.outputs = float(np.max([self.outputs, np.nan_to_num(outputs, nan=1e9)]))
        scaled, own = np.nan_to_num(gradient, nan=1e9)
        self.gradient, self.own = float(np.max([self.gradient, scaled])), float(np.max([self.own, own]))


def mixed_subject(family: str, trained: str, dtype: torch.dtype) -> Subject:
    """Return a model and its oracle; with adapters, two of them, with different targets."""
    subject = make_subject(family, trained, dtype)
    if trained == "adapter":
        for model in (subject.model, subject.oracle):
            model.add_adapter(SECOND, LoraConfig(r=3, target_modules=["v_proj", "gate_proj"]))
        with torch.no_grad():
            for name, parameter in subject.model.named_parameters():
                if f".{SECOND}." in name:
                    parameter.copy_(0.2 * torch.randn_like(parameter))
        subject.oracle.load_state_dict(subject.model.state_dict())
    return subject


def mixed_requests(shape: Shape, draw: np.random.Generator, *, adapters: bool) -> list[Request]:
    """Return the shape's requests, each with outputs, a grad mode and an adapter of its own."""
    return [_mixed(request, draw, adapters=adapters) for request in requests(shape, draw)]


def _mixed(request: Request, draw: np.random.Generator, *, adapters: bool) -> Request:
    length = request.num_tokens
    wanted = draw.random(4) < 0.45
    if not wanted.any():
        wanted[draw.integers(0, 4)] = True
    labels = None
    if wanted[0]:
        labels = draw.integers(0, VOCABULARY, length if draw.random() < 0.5 else (length, 3))
        labels[draw.random(labels.shape) < 0.3] = IGNORED
        labels.flat[0] = 0
    dense = bool(wanted[1:].any())
    some = draw.integers(0, length, max(1, length // 3)) if draw.random() < 0.6 else None
    no_grad = bool(draw.random() < 0.25)
    names = [None, SECOND, *([BASE] if no_grad else [])] if adapters else [None]
    return Request(
        tokens=request.tokens,
        labels=labels,
        top_k=int(draw.integers(1, 6)) if wanted[1] else None,
        logits=bool(wanted[2]),
        hidden_states=bool(wanted[3]),
        at=some if dense else None,
        no_grad=no_grad,
        adapter=names[int(draw.integers(0, len(names)))],
    )


def check_mixed(subject: Subject, trained: str, recompute: str, shape: Shape, seed: int, errors: Errors) -> None:
    """Run one random split of a shape's mixed batch against the oracle."""
    draw = np.random.default_rng(seed)
    batch = mixed_requests(shape, draw, adapters=trained == "adapter")
    runtime = TransformersRuntime(subject.model, recompute=recompute)  # type: ignore[arg-type]
    known, grads = _alone(subject, batch, seed)
    found: dict[int, list[Tensor]] = {}
    for parameter in runtime.trainable_parameters():
        parameter.grad = None
    for indices, layout in _passes(batch, draw):
        adapter = batch[indices[0]].adapter
        work = pass_work([batch[index] for index in indices], indices, layout, adapter=adapter)
        result = run_forward(runtime, work, head_chunk_rows=7, map_error=lambda error: error)
        found |= {index: _tensors(one) for index, one in zip(indices, result.outputs, strict=True)}
        if result.graph is not None:
            losses = [_loss(_tensors(one), index, seed) for index, one in zip(indices, result.outputs, strict=True)]
            torch.stack(losses).sum().backward()
        errors.passes += 1
    off = [
        float((ours.detach() - theirs).abs().max())
        for index in range(len(batch))
        for ours, theirs in zip(found[index], known[index], strict=True)
    ]
    errors.meet(float(np.max(off)), _gradient_error(subject.model, grads))


def _passes(batch: Sequence[Request], draw: np.random.Generator) -> Iterator[Pass]:
    """Yield random passes of requests that may share one."""
    kinds = sorted({(one.no_grad, one.adapter or "") for one in batch})
    for kind in kinds:
        members = [index for index, one in enumerate(batch) if (one.no_grad, one.adapter or "") == kind]
        # Splits are drawn by labels; what is drawn for is only the tree.
        plain = [replace(batch[index], labels=np.zeros(batch[index].num_tokens, dtype=np.int64)) for index in members]
        for chosen, layout in random_split(plain, draw):
            yield tuple(members[place] for place in chosen), layout


def _tensors(outputs: Outputs) -> list[Tensor]:
    found = (outputs.logprobs, outputs.top_logprobs, outputs.logits, outputs.hidden_states)
    return [tensor for tensor in found if tensor is not None]


def _loss(outputs: Sequence[Tensor], index: int, seed: int) -> Tensor:
    """Return a loss with a weight for each position, so that two ranked tokens may change places."""
    parts = []
    for kind, tensor in enumerate(outputs):
        draw = torch.Generator().manual_seed(1000 * seed + 10 * index + kind)
        shape = (tensor.shape[0], *([1] * (tensor.ndim - 1)))
        parts.append((tensor * torch.randn(shape, generator=draw, dtype=tensor.dtype)).sum())
    return torch.stack(parts).sum()


def _alone(subject: Subject, batch: Sequence[Request], seed: int) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """Return every output of each request run alone, and the gradient of the loss by parameter name."""
    oracle = subject.oracle
    grads = {name: torch.zeros_like(parameter) for name, parameter in oracle.named_parameters()}
    known = []
    for index, request in enumerate(batch):
        if isinstance(oracle, PeftModel) and request.adapter != BASE:
            oracle.set_adapter(request.adapter or "default")
        off = oracle.disable_adapter() if request.adapter == BASE else nullcontext()
        with torch.set_grad_enabled(not request.no_grad), off:
            outputs = _outputs(oracle, request)
            known.append([tensor.detach() for tensor in outputs])
        if request.no_grad or not request.computes:
            continue
        held = [(name, one) for name, one in oracle.named_parameters() if one.requires_grad]
        parts = torch.autograd.grad(_loss(outputs, index, seed), [one for _, one in held], allow_unused=True)
        for (name, _), part in zip(held, parts, strict=True):
            if part is not None:
                grads[name] += part
    return known, grads


def _outputs(oracle: Any, request: Request) -> list[Tensor]:
    found = oracle(input_ids=torch.from_numpy(request.tokens.copy())[None], use_cache=False, output_hidden_states=True)
    logits, at = found.logits[0], torch.from_numpy(request.positions.copy())
    logprobs, outputs = logits.double().log_softmax(-1), []
    if request.labels is not None:
        labels = torch.from_numpy(request.labels.copy())
        picked = logprobs.gather(1, labels.clamp_min(0).reshape(len(labels), -1)).view(labels.shape)
        outputs.append(torch.where(labels == IGNORED, 0.0, picked).to(logits.dtype))
    if request.top_k is not None:
        outputs.append(logprobs[at].topk(request.top_k).values.to(logits.dtype))
    if request.logits:
        outputs.append(logits[at])
    if request.hidden_states:
        outputs.append(found.hidden_states[-1][0][at])
    return outputs


SMALL = 1e-3
"""A parameter whose gradient is a smaller part of the whole gradient than this is judged against that part: it is a
difference of terms that cancel (keys, queries and their norms in requests of a few tokens), rounded as they are.
"""


def _gradient_error(model: Any, wanted: dict[str, Tensor]) -> tuple[float, float]:
    """Return the worst parameter's error over its norm, at least ``SMALL`` of the whole gradient's, and over its own.

    A parameter whose gradient is zero but for rounding (keys and queries of one-token requests) is judged against the
    whole gradient.
    A parameter that no request reaches must have no gradient, or one of zeros.
    """
    whole = float(torch.stack([grad.double().norm() for grad in wanted.values()]).norm())
    if not whole:
        return 0.0, 0.0
    worst = worst_own = 0.0
    for name, parameter in model.named_parameters():
        scale = float(wanted[name].double().norm())
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        off = float((found - wanted[name]).double().norm())
        rounding = 64 * torch.finfo(parameter.dtype).eps
        own = scale if scale > rounding * whole else whole
        worst = float(np.max([worst, off / (max(own, SMALL * whole))]))
        worst_own = float(np.max([worst_own, off / own]))
    return worst, worst_own
