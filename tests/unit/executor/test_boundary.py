"""The autograd boundary: what reaches ``.grad``, when, and what is refused."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer_rank.errors import BackwardError, TrainerRankError
from trainer_rank.executor.boundary import PassGraph, Source, attach, scattered

SIZES = (2, 3, 1)
"""Elements of three outputs; element 1 is ignored (never scored)."""
SLOT = (0, 2, 3, 4, 5)


class Failing(torch.autograd.Function):
    """Identity whose backward runs out of memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise torch.OutOfMemoryError("the device is full")


class Model:
    """Two parameters and one that no pass reaches."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.first = torch.randn(4, dtype=torch.float64, requires_grad=True)
        self.second = torch.randn(5, dtype=torch.float64, requires_grad=True)
        self.unreached = torch.randn(2, dtype=torch.float64, requires_grad=True)
        self.parameters = [self.first, self.second, self.unreached]

    def logprobs(self, *, fail: bool = False) -> Tensor:
        """(5,) with graph; with ``fail`` the gradient of ``second`` is complete before that of ``first`` fails."""
        first = Failing.apply(self.first) if fail else self.first
        return first.sin().sum() * self.second.exp()

    def grads(self) -> list[Tensor]:
        """Copies of the accumulated gradients."""
        return [parameter.grad.clone() for parameter in self.parameters if parameter.grad is not None]

    def run(
        self, *, fail: bool = False, map_error: Any = lambda error: error, scored: Sequence[bool] = (True, True, True)
    ) -> tuple[PassGraph, tuple[Tensor, ...]]:
        """Run a pass and return its graph and outputs."""
        logprobs = self.logprobs(fail=fail)
        slot = torch.tensor(SLOT)
        flat = torch.zeros(sum(SIZES), dtype=torch.float64).index_copy_(0, slot, logprobs.detach())
        graph = graph_of(logprobs, slot, SIZES, scored, self.parameters, map_error)
        return graph, attach(graph, flat.split(list(SIZES)))


def graph_of(
    logprobs: Tensor | None,
    slot: Tensor,
    sizes: Sequence[int],
    scored: Sequence[bool],
    parameters: Sequence[Tensor],
    map_error: Any,
) -> PassGraph:
    """The graph of a pass whose requests have log-probs and nothing else."""
    sources = []
    if logprobs is not None:
        cotangent = scattered(logprobs, slot, sizes)
        sources = [Source(tensor=logprobs, outputs=range(len(sizes)), cotangent=cotangent)]
    waiting = [owner for owner, some in enumerate(scored) if some]
    return PassGraph(sources, range(len(sizes)), waiting, parameters, map_error)


def loss_of(outputs: Sequence[Tensor]) -> Tensor:
    """A loss in which every element has a gradient of its own."""
    return torch.stack([(output.square() * (number + 1)).sum() for number, output in enumerate(outputs)]).sum()


def expected(model: Model) -> list[Tensor]:
    """The gradients of ``loss_of`` without a boundary."""
    flat = torch.zeros(sum(SIZES), dtype=torch.float64).index_copy(0, torch.tensor(SLOT), model.logprobs())
    grads = torch.autograd.grad(loss_of(flat.split(list(SIZES))), model.parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(model.parameters, grads, strict=True)]


def assert_grads(model: Model, wanted: Sequence[Tensor], *, times: int = 1) -> None:
    """Assert that all three parameters have ``times`` the wanted gradient."""
    found = model.grads()
    assert len(found) == 3
    torch.testing.assert_close(found, [times * grad for grad in wanted])


def test_the_outputs_are_the_log_probs_with_zeros_where_nothing_is_scored() -> None:
    """Values pass unchanged, in the order of the slots."""
    model = Model()
    _, outputs = model.run()
    assert [output.numel() for output in outputs] == list(SIZES)
    assert torch.equal(torch.cat(list(outputs))[list(SLOT)], model.logprobs())
    assert outputs[0][1] == 0


def test_the_gradient_is_that_of_the_whole_graph() -> None:
    """The boundary changes nothing about the gradient; a parameter that was not reached gets an exact zero."""
    model = Model()
    wanted = expected(model)
    loss_of(model.run()[1]).backward()
    assert_grads(model, wanted)
    assert model.unreached.grad is not None
    assert model.unreached.grad.tolist() == [0.0, 0.0]


def test_gradients_accumulate_over_passes() -> None:
    """Each pass adds to what is there."""
    model = Model()
    wanted = expected(model)
    for count in (1, 2, 3):
        loss_of(model.run()[1]).backward()
        assert_grads(model, wanted, times=count)


def test_two_passes_may_be_alive_at_once() -> None:
    """A loss over two passes reaches both graphs."""
    model = Model()
    wanted = expected(model)
    (_, first), (_, second) = model.run(), model.run()
    (loss_of(first) + loss_of(second)).backward()
    assert_grads(model, wanted, times=2)


@pytest.mark.parametrize("accumulated", [False, True])
def test_a_failed_backward_leaves_grad_bitwise_as_it_was(accumulated: bool) -> None:
    """Nothing of a pass is committed unless all of it succeeded."""
    model = Model()
    if accumulated:
        loss_of(model.run()[1]).backward()
    before = model.grads()
    graph, outputs = model.run(fail=True)
    with pytest.raises(torch.OutOfMemoryError, match="the device is full"):
        loss_of(outputs).backward()
    after = model.grads()
    assert len(after) == len(before) == (3 if accumulated else 0)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert not graph.alive


def test_a_step_after_a_failed_backward_works() -> None:
    """The next pass commits as if the failure had not been."""
    model = Model()
    wanted = expected(model)
    with pytest.raises(torch.OutOfMemoryError):
        loss_of(model.run(fail=True)[1]).backward()
    loss_of(model.run()[1]).backward()
    assert_grads(model, wanted)


def test_the_failure_is_mapped_and_keeps_its_cause() -> None:
    """The caller sees the library's error; the device's own is its cause."""
    _, outputs = Model().run(fail=True, map_error=lambda error: TrainerRankError("mapped"))
    with pytest.raises(TrainerRankError, match="mapped") as caught:
        loss_of(outputs).backward()
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_backward_after_a_failed_one_is_an_error() -> None:
    """The graph of a failed pass is gone, so its gradient can no longer be had."""
    _, outputs = Model().run(fail=True)
    loss = loss_of(outputs)
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward(retain_graph=True)
    with pytest.raises(BackwardError):
        loss.backward()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_partial_losses_add_up_to_the_whole(order: tuple[int, ...]) -> None:
    """Outputs may be sent backward one after another, in any order; the graph lives until the last."""
    model = Model()
    wanted = expected(model)
    graph, outputs = model.run()
    for position in order:
        assert graph.alive
        ((position + 1) * outputs[position].square().sum()).backward()
    assert not graph.alive
    assert_grads(model, wanted)


def test_the_graph_is_freed_without_waiting_for_outputs_that_score_nothing() -> None:
    """An output whose labels are all ignored has no gradient to wait for."""
    graph, outputs = Model().run(scored=(True, True, False))
    (outputs[0].sum() + outputs[1].sum()).backward()
    assert not graph.alive


def test_a_second_backward_is_an_error_that_says_what_to_do() -> None:
    """Even through one output only, while the others still wait; gradients do not change."""
    model = Model()
    graph, outputs = model.run()
    outputs[0].sum().backward()
    before = model.grads()
    with pytest.raises(BackwardError, match=r"second time.*add the losses.*retain_graph=True"):
        outputs[0].sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(model.grads(), before, strict=True))
    assert graph.alive


def test_a_backward_through_a_finished_pass_is_an_error() -> None:
    """After the last output the graph is freed."""
    _, outputs = Model().run()
    loss_of(outputs).backward()
    with pytest.raises(BackwardError):
        loss_of(outputs).backward()


def test_retain_graph_allows_another_backward() -> None:
    """As in torch: each backward adds the gradient again, and one without it is the last."""
    model = Model()
    wanted = expected(model)
    graph, outputs = model.run()
    loss = loss_of(outputs)
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    assert graph.alive
    loss.backward()
    assert not graph.alive
    assert_grads(model, wanted, times=3)
    with pytest.raises(BackwardError):
        loss_of(outputs).backward()


def test_the_inner_graph_is_let_go_after_the_last_backward() -> None:
    """Outputs the caller keeps do not keep the pass's activations."""
    model = Model()
    logprobs = model.logprobs()
    watched = weakref.ref(logprobs)
    slot = torch.tensor(SLOT)
    graph = graph_of(logprobs, slot, SIZES, (True,) * 3, model.parameters, lambda error: error)
    outputs = attach(graph, torch.zeros(sum(SIZES), dtype=torch.float64).split(list(SIZES)))
    del logprobs
    assert watched() is not None
    loss_of(outputs).backward()
    assert watched() is None


def test_a_pass_that_scores_nothing_gives_exact_zero_gradients() -> None:
    """There is no inner graph; the loss is legal and the step after it too."""
    model = Model()
    graph = graph_of(
        None, torch.empty(0, dtype=torch.int64), SIZES, (False,) * 3, model.parameters, lambda error: error
    )
    outputs = attach(graph, torch.zeros(sum(SIZES), dtype=torch.float64).split(list(SIZES)))
    loss_of(outputs).backward()
    assert_grads(model, [torch.zeros_like(parameter) for parameter in model.parameters])


def test_outputs_may_be_changed_in_place() -> None:
    """A caller's in-place loss is no error and has the right gradient."""
    model = Model()
    wanted = expected(model)
    outputs = model.run()[1]
    for output in outputs:
        output.mul_(2)
    (loss_of(outputs) / 4).backward()
    assert_grads(model, wanted)


def test_the_first_gradient_is_not_shared_with_the_caller() -> None:
    """Changing ``.grad`` after one pass does not reach into another pass's gradient."""
    model = Model()
    wanted = expected(model)
    _, outputs = model.run()
    loss = loss_of(outputs)
    loss.backward(retain_graph=True)
    for parameter in model.parameters:
        parameter.grad.zero_()  # type: ignore[union-attr]
    loss.backward()
    assert_grads(model, wanted)


@pytest.mark.parametrize("name", ["added", "summed"])
def test_gradients_that_share_memory_accumulate_apart(name: str) -> None:
    """autograd may hand out one tensor for two parameters, or one element for many; ``.grad`` never shares."""
    a, b = (torch.full((3,), value, requires_grad=True) for value in (1.0, 2.0))
    for count in (1, 2, 3):
        logprobs = a + b if name == "added" else (a.sum() + b.sum()).expand(3)
        graph = graph_of(logprobs, torch.arange(3), (3,), (True,), [a, b], lambda error: error)
        (output,) = attach(graph, [logprobs.detach().clone()])
        output.sum().backward()
        for parameter in (a, b):
            assert parameter.grad is not None
            assert parameter.grad.tolist() == [count * (1.0 if name == "added" else 3.0)] * 3
