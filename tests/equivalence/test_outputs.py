"""Every kind of output, mixed in one pass: the numbers and gradients of the library's model on each request alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from tests.equivalence.models import FAMILIES, VOCABULARY, Numbers, Pair, assert_same, tiny_model
from trainer_rank.errors import BackwardError
from trainer_rank.executor.run import Outputs, run_forward
from trainer_rank.planner import pass_work
from trainer_rank.prefix import Layout
from trainer_rank.requests import BASE, IGNORED, Request
from trainer_rank.runtime.transformers import TransformersRuntime
from trainer_rank.session import TrainerRank

DRAW = np.random.default_rng(7)
ROOT, BRANCH = DRAW.integers(0, VOCABULARY, 11), DRAW.integers(0, VOCABULARY, 6)


def row(*parts: Any) -> Any:
    return np.concatenate(parts)


def tail(seed: int, length: int) -> Any:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length)


def wide(tokens: Any, width: int, seed: int) -> Any:
    labels = np.random.default_rng(seed).integers(0, VOCABULARY, (len(tokens), width))
    labels[np.random.default_rng(seed + 1).random(labels.shape) < 0.4] = IGNORED
    return labels


def mixed() -> list[Request]:
    """Requests on one tree, each of another kind; two share a branch, and one repeats another's tokens."""
    first, second = row(ROOT, BRANCH, tail(1, 5)), row(ROOT, BRANCH, tail(2, 3))
    third = row(ROOT, tail(3, 7))
    return [
        Request.next_token(first),
        Request(tokens=second, labels=wide(second, 3, 5), top_k=2, at=[0, 12, 15, 12]),
        Request(tokens=first, top_k=5),
        Request(tokens=third, logits=True, at=[17, 3]),
        Request(tokens=second, hidden_states=True),
        Request.next_token(third, logits=True, hidden_states=True, top_k=1, at=[5, 10, 11]),
        Request.next_token(tail(4, 6)),
        Request(tokens=first[:4], labels=np.full(4, IGNORED)),
    ]


def flat(outputs: Outputs) -> list[Tensor]:
    """The outputs of one request, in one order."""
    kinds = (outputs.logprobs, outputs.top_logprobs, outputs.logits, outputs.hidden_states)
    return [tensor for tensor in kinds if tensor is not None]


def oracle_outputs(model: Any, request: Request) -> tuple[list[Tensor], Tensor | None]:
    """The library's own model on one request alone, with graph, and the ids of its likeliest tokens."""
    found = model(input_ids=torch.from_numpy(request.tokens.copy())[None], use_cache=False, output_hidden_states=True)
    logits, hidden = found.logits[0], found.hidden_states[-1][0]
    at = torch.from_numpy(request.positions.copy())
    logprobs, outputs, ids = logits.log_softmax(-1), [], None
    if request.labels is not None:
        labels = torch.from_numpy(request.labels.copy())
        picked = logprobs.gather(1, labels.clamp_min(0).reshape(len(labels), -1)).view(labels.shape)
        outputs.append(torch.where(labels == IGNORED, 0.0, picked))
    if request.top_k is not None:
        top = logprobs[at].topk(request.top_k)
        ids = top.indices
        outputs.append(top.values)
    if request.logits:
        outputs.append(logits[at])
    if request.hidden_states:
        outputs.append(hidden[at])
    return outputs, ids


def weighted(outputs: Sequence[Tensor], number: int) -> Tensor:
    """A loss in which every element of every output has a weight of its own."""
    parts = []
    for kind, tensor in enumerate(outputs):
        draw = torch.Generator().manual_seed(100 * number + kind)
        parts.append((tensor * torch.randn(tensor.shape, generator=draw, dtype=tensor.dtype)).sum())
    return torch.stack(parts).sum()


def alone(model: Any, requests: Sequence[Request]) -> tuple[Numbers, list[Tensor | None]]:
    """Every output and the gradient of the loss over all, from the library's model."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    grads = [torch.zeros_like(parameter) for parameter in parameters]
    values, ids = [], []
    for number, request in enumerate(requests):
        outputs, found = oracle_outputs(model, request)
        ids.append(found)
        values += [tensor.detach() for tensor in outputs]
        if request.num_trained:
            found_grads = torch.autograd.grad(weighted(outputs, number), parameters, allow_unused=True)
            for total, grad in zip(grads, found_grads, strict=True):
                if grad is not None:
                    total += grad
    return Numbers(values, grads), ids


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("lora", "recompute"), [(True, "full"), (False, "none"), (True, "none"), (False, "full")])
def test_every_kind_of_output_is_that_of_the_request_alone(family: str, lora: bool, recompute: str) -> None:
    """Labels, wide labels, top-k, logits and hidden states in one pass, under every layout and cut in two."""
    pair, requests = Pair.make(family, lora=lora, recompute=recompute), mixed()
    wanted, ids = alone(pair.oracle, requests)
    for layout in (Layout.full_sharing(), Layout.no_sharing(), None):
        for cut in (0, 3, 6):
            pair.clear()
            outputs: list[Outputs] = []
            for part in (range(cut), range(cut, len(requests))):
                if not part:
                    continue
                work = pass_work([requests[index] for index in part], list(part), layout)
                result = run_forward(pair.runtime, work, head_chunk_rows=5, map_error=lambda error: error)
                outputs += result.outputs
                losses = [weighted(flat(one), index) for index, one in zip(part, result.outputs, strict=True)]
                torch.stack(losses).sum().backward()
                assert result.graph is not None
                assert not result.graph.alive
            found = Numbers([tensor.detach() for one in outputs for tensor in flat(one)], pair.grads())
            assert_same(found, wanted)
            for one, expected in zip(outputs, ids, strict=True):
                assert (one.top_ids is None) == (expected is None)
                if one.top_ids is not None and expected is not None:
                    assert torch.equal(one.top_ids, expected)


def test_one_output_of_a_request_is_enough_and_a_second_backward_is_an_error() -> None:
    """A loss that reads the log-probs only frees the graph; coming back for the logits is an error in words."""
    pair = Pair.make("llama", lora=True)
    request = Request.next_token(ROOT, logits=True, at=[3])
    result = run_forward(pair.runtime, pass_work([request], [0]), head_chunk_rows=5, map_error=lambda error: error)
    (outputs,) = result.outputs
    assert outputs.logprobs is not None
    assert outputs.logits is not None
    outputs.logprobs.sum().backward()
    assert result.graph is not None
    assert not result.graph.alive
    with pytest.raises(BackwardError, match="second time"):
        outputs.logits.sum().backward()


def test_the_rank_hands_every_kind_out_and_prices_it() -> None:
    """Through the rank, split and whole: the same values, with shapes and dtypes as documented."""
    pair, requests = Pair.make("llama", lora=True), mixed()
    wanted, ids = alone(pair.oracle, requests)
    found: dict[int, list[Tensor]] = {}
    rank = TrainerRank(pair.runtime, memory_budget="8GiB", max_packed_tokens=25)
    count = 0
    for micro_batch in rank.forward_micro_batches(requests):
        count += 1
        losses = []
        for index, result in zip(micro_batch.indices, micro_batch.results, strict=True):
            top = None if result.top_k is None else result.top_k.logprobs
            tensors = [one for one in (result.logprobs, top, result.logits, result.hidden_states) if one is not None]
            found[index] = [one.detach() for one in tensors]
            losses.append(weighted(tensors, index))
            if result.top_k is not None:
                assert torch.equal(result.top_k.ids, ids[index])  # type: ignore[arg-type]
        torch.stack(losses).sum().backward()
    assert count > 1
    values = [one for index in range(len(requests)) for one in found[index]]
    assert_same(Numbers(values, pair.grads()), wanted)


def adapters(seed_model: Any) -> Any:
    """Two adapters with different targets, far from zero."""
    model = get_peft_model(
        seed_model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False), adapter_name="one"
    )
    model.add_adapter("two", LoraConfig(r=3, target_modules=["v_proj", "q_proj"], init_lora_weights=False))
    return model


@pytest.mark.parametrize("recompute", ["full", "none"])
def test_adapters_in_one_batch_are_never_mixed_up(recompute: Any) -> None:
    """Requests of two adapters and of none, sharing all their tokens: each gets its own model's numbers."""
    model, oracle = adapters(tiny_model("llama", lora=False)), adapters(tiny_model("llama", lora=False))
    oracle.load_state_dict(model.state_dict())
    runtime = TransformersRuntime(model, recompute=recompute)
    assert runtime.facts.adapters == ("one", "two", BASE)
    requests = [
        Request.next_token(row(ROOT, tail(number, 4)), adapter=adapter, no_grad=adapter == BASE)
        for number in range(3)
        for adapter in (None, "two", BASE, "one")
    ]
    rank = TrainerRank(runtime, memory_budget="8GiB")
    found: dict[int, Tensor] = {}
    losses = []
    # All graphs are alive together, and backward comes after other adapters have run.
    for micro_batch in rank.forward_micro_batches([requests]):
        for index, result in zip(micro_batch.indices, micro_batch.results, strict=True):
            assert result.logprobs is not None
            found[index] = result.logprobs.detach()
            if not requests[index].no_grad:
                losses.append(weighted([result.logprobs], index))
    torch.stack(losses).sum().backward()
    names = [name for name, _ in oracle.named_parameters()]
    grads = {name: torch.zeros_like(parameter) for name, parameter in oracle.named_parameters()}
    for number, request in enumerate(requests):
        with oracle.disable_adapter() if request.adapter == BASE else torch.enable_grad():
            if request.adapter != BASE:
                oracle.set_adapter(request.adapter or "one")
            outputs, _ = oracle_outputs(oracle, request)
            assert float((found[number] - outputs[0].detach()).abs().max()) <= 1e-10
            if request.adapter == BASE:
                continue
            parameters = [parameter for parameter in oracle.parameters() if parameter.requires_grad]
            held = [name for name, parameter in oracle.named_parameters() if parameter.requires_grad]
            for name, grad in zip(held, torch.autograd.grad(weighted(outputs, number), parameters), strict=True):
                grads[name] += grad
    assert len(names) == len(dict(model.named_parameters()))
    checked = 0
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            assert parameter.grad is None
            continue
        assert parameter.grad is not None
        assert float((parameter.grad - grads[name]).norm()) <= 1e-10 * float(grads[name].norm())
        checked += 1
    assert checked == len(runtime.trainable_parameters()) == 16
