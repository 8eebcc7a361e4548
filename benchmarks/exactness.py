"""Every layout and every split gives the numbers of the stock library model run one request at a time.

The oracle is the library's own model with its own ``sdpa`` attention, each request alone, log-softmax over all rows.
The loss is a sum over labels with random weights, so that no gradient is symmetric. For each family (Llama, Qwen2,
Qwen3; random weights, grouped-query heads), LoRA and full fine-tuning, per-layer recompute on and off:

* Shapes of at most four layout decisions and six requests: all layouts of all splits into passes. Passes meet only in
  ``.grad``, to which they add, so each distinct pass (some of the requests under some layout) runs once; the error of a
  split is at most the sum of the errors of its passes, and that sum is what is reported.
* All other shapes: 32 random splits with random layouts, dealt out over the twelve ways to train. Every small shape is
  run once more in each of the twelve ways. Here ``.grad`` accumulates over the passes of the split.
* SmolLM2-135M on chat text: log-probs only.

Figures: ``float64_*`` in float64 with a float64 RMSNorm on both sides (the stock one computes in float32), ``float32_*``
in float32 as the library ships it. ``*_logp`` is the largest absolute difference of a log-prob, ``*_grad`` the norm of
the difference over the norm of the reference for the worst single parameter.
"""

from __future__ import annotations

from _harness import finish, pin_threads, quick, target

pin_threads(1)

import itertools  # noqa: E402
import time  # noqa: E402
import warnings  # noqa: E402
from collections.abc import Iterator, Sequence  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from dataclasses import dataclass, field  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from _chat import chat_trees  # noqa: E402
from _shapes import VOCABULARY, Shape, requests, shapes  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config, Qwen3Config  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaRMSNorm  # noqa: E402
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm  # noqa: E402
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm  # noqa: E402

from trainer_rank import Layout, Request, TransformersRuntime  # noqa: E402
from trainer_rank.executor.run import run_forward  # noqa: E402
from trainer_rank.planner import pass_work  # noqa: E402
from trainer_rank.prefix import build_tree, pack  # noqa: E402
from trainer_rank.requests import IGNORED  # noqa: E402

SAMPLES = 32
HEAD_CHUNK_ROWS = 7
REAL_MODEL = Path(__file__).resolve().parents[1] / ".cache" / "smollm2-135m"

Part = tuple[tuple[int, ...], Layout]
"""One pass: the requests in it and its layout."""


@dataclass(frozen=True, slots=True)
class Way:
    """One of the twelve ways to train."""

    family: str
    adapter: str
    recompute: str


FAMILIES = ("llama", "qwen2", "qwen3")
WAYS = [Way(*way) for way in itertools.product(FAMILIES, ("lora", "all weights"), ("full", "none"))]


@dataclass(slots=True)
class Worst:
    """The worst errors of one way, and how many passes and combinations of split and layouts stand behind them."""

    logp: float = 0.0
    grad: float = 0.0
    logp_where: str = ""
    grad_where: str = ""
    passes: int = 0
    combinations: int = 0

    def meet(self, logp: float, grad: float, logp_where: str, grad_where: str) -> None:
        """Take in the errors of one case; NaN counts as infinite."""
        logp, grad = (float("inf") if error != error else error for error in (logp, grad))
        if logp >= self.logp:
            self.logp, self.logp_where = logp, logp_where
        if grad >= self.grad:
            self.grad, self.grad_where = grad, grad_where


@dataclass(slots=True)
class Subject:
    """A model under test and its oracle, with the same weights."""

    way: Way
    model: Any
    oracle: Any
    runtime: TransformersRuntime | None = field(default=None)

    def run_as(self, recompute: str) -> TransformersRuntime:
        """Return the model under test with ``recompute``."""
        if self.runtime is None or self.runtime.recompute != recompute:
            self.runtime = TransformersRuntime(self.model, recompute=recompute)
        return self.runtime

    def parameter_names(self) -> list[str]:
        """Return the names of the trained parameters."""
        return [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]


@dataclass(frozen=True, slots=True)
class Reference:
    """What the oracle gives: log-probs and gradients of each request, and each parameter's scale."""

    logprobs: list[Tensor]
    grads: list[list[Tensor]]
    scale: Tensor


def tiny_config(family: str) -> Any:
    """Return two or three layers with grouped-query heads; Qwen2 has biases, Qwen3 a head size of its own."""
    common = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        # Large enough that attention is far from uniform, so that a wrong mask moves the numbers.
        "initializer_range": 0.15,
    }
    if family == "llama":
        return LlamaConfig(num_hidden_layers=2, tie_word_embeddings=False, **common)
    if family == "qwen2":
        return Qwen2Config(num_hidden_layers=2, tie_word_embeddings=True, **common)
    return Qwen3Config(num_hidden_layers=3, tie_word_embeddings=True, head_dim=24, **common)


def make_subject(way: Way, dtype: torch.dtype) -> Subject:
    """Return a model with random weights and a stock copy of it."""
    torch.manual_seed(0)
    model = _tiny_model(way, dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif "lora" in name:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    oracle = _tiny_model(way, dtype)
    oracle.load_state_dict(model.state_dict())
    return Subject(way, model, oracle)


def _tiny_model(way: Way, dtype: torch.dtype) -> Any:
    model = AutoModelForCausalLM.from_config(tiny_config(way.family), dtype=dtype, attn_implementation="sdpa")
    if way.adapter == "lora":
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
        return get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    return model


@contextmanager
def float64_norms() -> Iterator[None]:
    """Give RMSNorm, which computes in float32 whatever its input, the precision of its input."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        mean = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(mean + self.variance_epsilon))

    stock = {cls: cls.forward for cls in (LlamaRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm)}
    for cls in stock:
        cls.forward = forward
    try:
        yield
    finally:
        for cls, method in stock.items():
            cls.forward = method


# -- oracle ----------------------------------------------------------------------------------------------------------


def alone(oracle: Any, request: Request) -> Tensor:
    """Return the log-probs of one request from the stock model, of its labels' shape, 0 where ignored."""
    labels = torch.from_numpy(request.labels.copy())
    logits = oracle(input_ids=torch.from_numpy(request.tokens.copy())[None], use_cache=False).logits[0]
    spread = logits.log_softmax(-1)
    picked = spread.gather(1, labels.clamp_min(0).reshape(len(labels), -1)).view(labels.shape)
    return torch.where(labels == IGNORED, 0.0, picked)


def reference(subject: Subject, batch: Sequence[Request], weights: Sequence[Tensor]) -> Reference:
    """Return the oracle's numbers."""
    parameters = [parameter for parameter in subject.oracle.parameters() if parameter.requires_grad]
    logprobs, grads = [], []
    for request, weight in zip(batch, weights, strict=True):
        found = alone(subject.oracle, request)
        logprobs.append(found.detach())
        grads.append(list(torch.autograd.grad((found * weight).sum(), parameters)))
    total = [torch.stack(each).sum(0) for each in zip(*grads, strict=True)]
    return Reference(logprobs, grads, _scale(total))


def _scale(total: Sequence[Tensor]) -> Tensor:
    """Return the norm of each parameter's gradient; the whole gradient's where it is zero but for rounding."""
    norms = torch.stack([grad.double().norm() for grad in total])
    rounding = 64 * torch.finfo(total[0].dtype).eps
    return torch.where(norms <= rounding * norms.norm(), norms.norm(), norms)


# -- subject ---------------------------------------------------------------------------------------------------------


def run(
    runtime: TransformersRuntime,
    batch: Sequence[Request],
    weights: Sequence[Tensor],
    known: Reference,
    parts: Sequence[Part],
) -> tuple[float, Tensor]:
    """Return the errors of a split: the worst log-prob, and the norm of the gradient's error by parameter over scale."""
    parameters = runtime.trainable_parameters()
    for parameter in parameters:
        parameter.grad = None
    worst, members = 0.0, []
    for indices, layout in parts:
        work = pass_work([batch[index] for index in indices], indices, layout)
        result = run_forward(runtime, work, head_chunk_rows=HEAD_CHUNK_ROWS, map_error=lambda error: error)
        pairs = list(zip(indices, result.logprobs, strict=True))
        worst = max(worst, *(float((known.logprobs[index] - found.detach()).abs().max()) for index, found in pairs))
        torch.stack([(weights[index] * found).sum() for index, found in pairs]).sum().backward()
        members += indices
    wanted = [torch.stack([known.grads[index][p] for index in members]).sum(0) for p in range(len(parameters))]
    found = [parameter.grad for parameter in parameters]
    off = torch.stack(torch._foreach_norm(torch._foreach_sub(found, wanted)))
    return worst, off.double() / known.scale


def passes_of(batch: Sequence[Request], members: tuple[int, ...]) -> tuple[list[Part], int]:
    """Return the passes of these requests whose packed rows differ, and the number of layouts they stand for."""
    tree = build_tree([batch[index].tokens for index in members])
    distinct: dict[tuple[bytes, ...], Part] = {}
    for decisions in itertools.product((False, True), repeat=tree.num_segments):
        layout = Layout.mixed(decisions)
        packed = pack(tree, layout)
        table = (packed.token_ids, packed.segment_start, packed.segment_parent, packed.request_segment)
        distinct.setdefault(tuple(array.tobytes() for array in table), (members, layout))
    return list(distinct.values()), 2**tree.num_segments


def splits(members: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    """Yield all partitions of ``members`` into passes."""
    if not members:
        yield []
        return
    first, *rest = members
    for size in range(len(rest) + 1):
        for others in itertools.combinations(rest, size):
            left = tuple(index for index in rest if index not in others)
            for tail in splits(left):
                yield [(first, *others), *tail]


def random_split(batch: Sequence[Request], draw: np.random.Generator) -> list[Part]:
    """Return a random split into at most four passes with a random layout each."""
    owner = draw.integers(0, draw.integers(1, 5), len(batch))
    parts = []
    for number in np.unique(owner):
        members = tuple(np.flatnonzero(owner == number).tolist())
        tree = build_tree([batch[index].tokens for index in members])
        share = draw.choice([0.0, 0.5, 0.8, 1.0])
        parts.append((members, Layout.mixed(tuple((draw.random(tree.num_segments) < share).tolist()))))
    return parts


def is_small(batch: Sequence[Request]) -> bool:
    """Return whether every layout and every split is run."""
    return len(batch) <= 6 and build_tree([request.tokens for request in batch]).num_segments <= 4


# -- cases -----------------------------------------------------------------------------------------------------------


def check_all(subject: Subject, case: Case, worst: Worst) -> None:
    """Run every layout of every split."""
    runtime, names, count = subject.run_as(subject.way.recompute), subject.parameter_names(), len(case.batch)
    known = reference(subject, case.batch, case.weights)
    errors: dict[tuple[int, ...], Tensor] = {}
    layouts: dict[tuple[int, ...], int] = {}
    for size in range(1, count + 1):
        for members in itertools.combinations(range(count), size):
            parts, layouts[members] = passes_of(case.batch, members)
            errors[members] = torch.zeros(len(names), dtype=torch.float64)
            for part in parts:
                logp, off = run(runtime, case.batch, case.weights, known, [part])
                errors[members] = torch.maximum(errors[members], off)
                worst.meet(logp, 0.0, f"{case.shape.name} {part}", worst.grad_where)
                worst.passes += 1
    for split in splits(tuple(range(count))):
        off = torch.stack([errors[members] for members in split]).sum(0)
        worst.meet(0.0, float(off.max()), worst.logp_where, f"{case.shape.name} {split} {names[int(off.argmax())]}")
        worst.combinations += int(np.prod([layouts[members] for members in split]))


def check_some(subject: Subject, case: Case, parts: Sequence[Sequence[Part]], worst: Worst) -> None:
    """Run some splits, with the gradient accumulated over their passes."""
    runtime, names = subject.run_as(subject.way.recompute), subject.parameter_names()
    known = reference(subject, case.batch, case.weights)
    for split in parts:
        logp, off = run(runtime, case.batch, case.weights, known, split)
        worst.meet(
            logp,
            float(off.max()),
            f"{case.shape.name} {split}",
            f"{case.shape.name} {split} {names[int(off.argmax())]}",
        )
        worst.passes += len(split)
        worst.combinations += 1


@dataclass(frozen=True, slots=True)
class Case:
    """A shape as requests, with a weight for each label."""

    shape: Shape
    batch: list[Request]
    weights: list[Tensor]
    small: bool


def make_case(shape: Shape, seed: int, dtype: torch.dtype) -> Case:
    """Return the shape's requests and weights."""
    draw = np.random.default_rng(seed)
    batch = requests(shape, draw)
    weights = [torch.from_numpy(draw.normal(size=request.labels.shape)).to(dtype) for request in batch]
    return Case(shape, batch, weights, is_small(batch))
