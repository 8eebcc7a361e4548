"""The optimizer step: torch's AdamW, paid for before it exists, skipped when the gradient is not finite."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.builders import completions, gradients, run
from tests.unit.session.conftest import NewRank
from trainer_rank.meters import Meter
from trainer_rank.report import AdmissionRecord, Record
from trainer_rank.session import TrainerRank

BATCH = completions([4, 6])
COMING = "optimizer state to come"


@pytest.mark.parametrize("lora", [True, False])
def test_its_state_is_charged_before_it_exists_and_not_after(new_rank: NewRank, meter: Meter, lora: bool) -> None:
    """The term is there in the first step's admissions, equals what the step then allocates, and is gone later."""
    records: list[Record] = []
    rank = new_rank(on_decision=records.append, model={"lora": lora})
    terms = []
    live = [0, 0]
    for _ in range(2):
        run(rank, BATCH)
        terms.append(next(one for one in reversed(records) if isinstance(one, AdmissionRecord)).terms)
        gc.collect()
        before = meter.read().allocated_bytes
        grads = sum(grad.numel() * grad.element_size() for grad in gradients(rank))
        rank.optim_step(lr=1e-3)
        gc.collect()
        live.append(meter.read().allocated_bytes - before + grads)
    assert terms[0][COMING] == rank.runtime.facts.adam_state_bytes
    assert live[2] == pytest.approx(terms[0][COMING], abs=64)
    assert COMING not in terms[1]
    assert live[3] == pytest.approx(0, abs=64)


def test_gradients_to_come_are_charged_when_there_is_more_than_one_pass(new_rank: NewRank) -> None:
    """They stand beside every later pass; a single pass has them in its own price."""
    records: list[AdmissionRecord] = []

    def note(record: Record) -> None:
        if isinstance(record, AdmissionRecord):
            records.append(record)

    run(new_rank(on_decision=note), BATCH)
    assert "gradients to come" not in records[0].terms
    records.clear()
    rank = new_rank(on_decision=note, max_packed_tokens=15)
    run(rank, BATCH)
    assert records[0].terms["gradients to come"] == rank.runtime.facts.trainable_bytes
    assert "gradients to come" not in records[1].terms


@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
def test_three_steps_are_torch_s_own(new_rank: NewRank, max_grad_norm: float | None) -> None:
    """Same gradients, same clipping, same schedule: the same weights as a plain AdamW over copies of them."""
    rank = new_rank()
    parameters = rank.runtime.trainable_parameters()
    copies = [parameter.detach().clone().requires_grad_() for parameter in parameters]
    plain = torch.optim.AdamW(copies, lr=1.0, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, foreach=False)
    for lr in (1e-2, 5e-3, 1e-3):
        _, grads, _ = run(rank, BATCH)
        for copy, grad in zip(copies, grads, strict=True):
            copy.grad = grad
        norm = torch.nn.utils.clip_grad_norm_(copies, max_grad_norm if max_grad_norm is not None else float("inf"))
        plain.param_groups[0]["lr"] = lr
        plain.step()
        outcome = rank.optim_step(lr=lr, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, max_grad_norm=max_grad_norm)
        assert (outcome.lr, outcome.skipped) == (lr, False)
        assert outcome.grad_norm == pytest.approx(float(norm), rel=1e-12)
        pairs = zip(parameters, copies, strict=True)
        assert all(torch.allclose(one, other, rtol=1e-12, atol=1e-14) for one, other in pairs)
    assert all(parameter.grad is None for parameter in parameters)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_dropped_with_a_warning(rank: TrainerRank, bad: float) -> None:
    """Weights stay, the gradient is cleared, and the outcome says that the step was skipped."""
    run(rank, BATCH)
    parameters = rank.runtime.trainable_parameters()
    before = [parameter.detach().clone() for parameter in parameters]
    assert parameters[0].grad is not None
    parameters[0].grad.view(-1)[0] = bad
    with pytest.warns(RuntimeWarning, match="this step is skipped"):
        outcome = rank.optim_step(lr=1e-2)
    assert outcome.skipped
    assert all(torch.equal(one, other) for one, other in zip(parameters, before, strict=True))
    assert all(parameter.grad is None for parameter in parameters)


def test_a_step_without_any_gradient_moves_nothing_and_makes_no_state(new_rank: NewRank) -> None:
    """Its state is still to come, and still charged."""
    records: list[Record] = []
    rank = new_rank(on_decision=records.append)
    assert rank.optim_step(lr=0.1).grad_norm == 0.0
    run(rank, BATCH)
    assert isinstance(records[0], AdmissionRecord)
    assert COMING in records[0].terms


def test_its_state_goes_into_another_rank(new_rank: NewRank) -> None:
    """Names are those of the trained parameters; the next step of both is the same, bit for bit."""
    rank, other = new_rank(), new_rank()
    assert rank.optimizer_state() == {}
    run(rank, BATCH)
    rank.optim_step(lr=1e-2)
    state = rank.optimizer_state()
    names = list(rank.runtime.trained())
    assert set(state) == {f"{slot}.{name}" for slot in ("step", "exp_avg", "exp_avg_sq") for name in names}
    other.load_optimizer_state(state)
    with torch.no_grad():
        for one, copy in zip(rank.runtime.trainable_parameters(), other.runtime.trainable_parameters(), strict=True):
            copy.copy_(one)
    for each in (rank, other):
        run(each, BATCH)
        each.optim_step(lr=1e-2)
    pairs = zip(rank.runtime.trainable_parameters(), other.runtime.trainable_parameters(), strict=True)
    assert all(torch.equal(one, copy) for one, copy in pairs)


def test_a_state_of_another_model_is_refused(new_rank: NewRank) -> None:
    """A name, a slot or a shape that is not the model's."""
    rank = new_rank()
    name = next(iter(rank.runtime.trained()))
    for key, tensor, reason in [
        ("exp_avg.nobody", torch.zeros(1), "must be of a trained parameter"),
        (f"momentum.{name}", torch.zeros(1), "slot must be one of step, exp_avg, exp_avg_sq, got 'momentum'"),
        (f"exp_avg.{name}", torch.zeros(1), r"exp_avg must have the shape .* got \(1,\)"),
    ]:
        with pytest.raises(ValueError, match=reason):
            rank.load_optimizer_state({key: tensor})
    assert rank.optimizer_state() == {}
