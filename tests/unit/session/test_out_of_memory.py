"""A real out-of-memory inside an admitted pass: named, survived, nothing half done."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.builders import (
    BentMeter,
    completions,
    distance,
    gradients,
    negative_sum,
    run,
)
from tests.unit.session.conftest import NewRank
from trainer_rank.errors import TrainerRankMemoryError
from trainer_rank.meters import Meter, open_meter
from trainer_rank.meters.counting_lib import load
from trainer_rank.session import TrainerRank
from trainer_rank.units import MIB

BATCH = completions([40, 33, 40, 25, 40, 38, 40, 12], prompt=60)


@pytest.fixture(scope="module")
def meter() -> Iterator[Meter]:
    """The counting meter: here out-of-memory must be real."""
    with open_meter("cpu", cpu="counting") as opened:
        yield opened


class Squeeze:
    """Offers everything; while ``spare_bytes`` is set the real allocator stops that far above what is live."""

    def __init__(self, meter: Meter) -> None:
        self.spare_bytes: int | None = None
        self.meter = BentMeter(meter, lambda reading: reading, cap_bytes=self.cap)

    def cap(self) -> int | None:
        """Return the cap on live bytes."""
        return None if self.spare_bytes is None else load().live_bytes() + self.spare_bytes


@pytest.fixture
def squeeze(meter: Meter) -> Iterator[Squeeze]:
    """A meter that admits what the allocator will not give; the cap is lifted afterwards."""
    yield Squeeze(meter)
    load().set_cap(None)


@pytest.mark.parametrize("phase", ["forward", "head"])
def test_out_of_memory_in_an_admitted_forward_is_named_and_survived(
    new_rank: NewRank, squeeze: Squeeze, phase: str
) -> None:
    """The device's error is the cause, the phase and the admission are there, gradients and the next step are fine."""
    model = {"vocabulary": 4000, "recompute": "full"} if phase == "head" else {}
    rank = new_rank(meter=squeeze.meter, model=model)
    loss, grads, _ = run(rank, BATCH)
    live = load().live_bytes()
    squeeze.spare_bytes = MIB
    with pytest.raises(TrainerRankMemoryError, match=f"out of memory in {phase} of an admitted pass") as caught:
        list(rank.forward_micro_batches(BATCH))
    error = caught.value
    assert (error.refused, error.phase, error.short_bytes) == (False, phase, 0)
    assert isinstance(error.__cause__, torch.OutOfMemoryError)
    assert error.admission is not None
    assert error.admission.price.required_bytes > MIB
    assert all(torch.equal(one, other) for one, other in zip(gradients(rank), grads, strict=True))
    assert load().live_bytes() - live < 0.1 * error.admission.price.required_bytes
    squeeze.spare_bytes = None
    again, again_grads, _ = run(rank, BATCH)
    assert again == loss
    assert distance(again_grads, grads) == 0.0
    rank.optim_step(lr=1e-3)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_out_of_memory_in_an_admitted_backward_leaves_gradients_as_they_were(
    new_rank: NewRank, squeeze: Squeeze, recompute: str
) -> None:
    """Bit for bit, also those of layers whose backward had finished; the graph is let go and the next step works."""
    rank = new_rank(meter=squeeze.meter, model={"recompute": recompute, "layers": 3})
    loss, grads, _ = run(rank, BATCH)
    (micro_batch,) = rank.forward_micro_batches(BATCH)
    total = negative_sum(micro_batch)
    live = load().live_bytes()
    load().set_cap(live + MIB // 4)
    with pytest.raises(TrainerRankMemoryError, match="out of memory in backward of an admitted pass") as caught:
        total.backward()
    error = caught.value
    assert (error.refused, error.phase) == (False, "backward")
    assert isinstance(error.__cause__, torch.OutOfMemoryError)
    assert all(torch.equal(one, other) for one, other in zip(gradients(rank), grads, strict=True))
    assert load().live_bytes() < live
    again, again_grads, _ = run(rank, BATCH)
    assert again == loss
    assert distance(again_grads, grads) == 0.0


def test_out_of_memory_in_the_first_optimizer_step_is_named_and_the_step_can_be_taken_later(
    new_rank: NewRank, squeeze: Squeeze
) -> None:
    """Moments that were half made are dropped; the gradient is still there and the same step is taken."""
    rank, twin = new_rank(meter=squeeze.meter, model={"lora": False}), new_rank(model={"lora": False})
    for one in (rank, twin):
        run(one, completions([3, 4]))
    load().set_cap(load().live_bytes() + rank.runtime.facts.adam_state_bytes // 2)
    with pytest.raises(TrainerRankMemoryError, match="out of memory in optimizer") as caught:
        rank.optim_step(lr=1e-2)
    assert (caught.value.refused, caught.value.phase) == (False, "optimizer")
    load().set_cap(None)
    rank.optim_step(lr=1e-2)
    twin.optim_step(lr=1e-2)
    pairs = zip(rank.runtime.trainable_parameters(), twin.runtime.trainable_parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_another_error_is_not_touched(rank: TrainerRank) -> None:
    """Only out-of-memory is mapped."""
    (micro_batch,) = rank.forward_micro_batches(completions([3]))
    loss = negative_sum(micro_batch)
    loss.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
