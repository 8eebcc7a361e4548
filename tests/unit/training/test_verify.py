"""Packed against alone during a run, and figures handed to callbacks."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.builders import completions, negative_sum, tiny_runtime
from tests.unit.training.test_loop import config, lines
from trainer_rank.errors import ConfigError, TrainingError
from trainer_rank.session import TrainerRank
from trainer_rank.training.callbacks import Scalars, evaluation_scalars, name_of, tell
from trainer_rank.training.config import TrainConfig
from trainer_rank.training.loop import train
from trainer_rank.training.progress import Silent
from trainer_rank.training.records import EvaluationRecord
from trainer_rank.training.verify import Verification

REQUESTS = completions([4, 6, 5, 7])
EVERY_SECOND = TrainConfig.model_validate(
    {"model": {"path": "m"}, "data": {"path": "d"}, "steps": 4, "verify_every": 2, "verify_requests": 2}
)


def test_the_difference_is_that_of_rounding_and_the_gradient_stays() -> None:
    """Two requests of four run again alone; the accumulated gradient is what it was, bit for bit."""
    rank = TrainerRank(tiny_runtime(dtype=torch.float32), verify_backend=False)
    verification = Verification(EVERY_SECOND, REQUESTS, step=2)
    for micro_batch in rank.forward_micro_batches(REQUESTS):
        negative_sum(micro_batch).backward()
        verification.keep(micro_batch)
        del micro_batch
    before = [parameter.grad.clone() for parameter in rank.runtime.trainable_parameters() if parameter.grad is not None]
    difference = verification.difference(rank)
    assert difference is not None
    assert 0 <= difference < 1e-4
    after = [parameter.grad for parameter in rank.runtime.trainable_parameters()]
    assert len(before) == len(after)
    assert all(other is not None and torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_difference_that_is_no_rounding_is_warned_of() -> None:
    """A log-probability that is off by 0.01 is found, whichever of the requests it belongs to."""
    rank = TrainerRank(tiny_runtime(dtype=torch.float32), verify_backend=False)
    verification = Verification(EVERY_SECOND, REQUESTS, step=2)
    for micro_batch in rank.forward_micro_batches([replace(one, no_grad=True) for one in REQUESTS]):
        for result in micro_batch.results:
            assert result.logprobs is not None
            result.logprobs[-1] += 0.01
        verification.keep(micro_batch)
    with pytest.warns(RuntimeWarning, match=r"step 2: packed and alone, .* differ by 0\.01, more than 0\.001"):
        assert verification.difference(rank) == pytest.approx(0.01, abs=1e-4)


def test_a_step_that_is_not_due_runs_nothing() -> None:
    """Step 3 of every second one."""
    rank = TrainerRank(tiny_runtime(dtype=torch.float32), verify_backend=False)
    verification = Verification(EVERY_SECOND, REQUESTS, step=3)
    for micro_batch in rank.forward_micro_batches(REQUESTS):
        verification.keep(micro_batch)
    assert verification.difference(rank) is None


def test_a_run_records_it_and_is_the_same_run(tiny_model: Path, rollouts_file: Path) -> None:
    """Steps 2 has the figure, and loss and norm of every step are those of a run that verifies nothing."""
    told: list[tuple[int, Scalars]] = []
    verified = train(
        config(tiny_model, rollouts_file, verify_every=2, verify_requests=3),
        progress=Silent(),
        callbacks=[lambda step, scalars: told.append((step, scalars))],
    )
    plain = train(config(tiny_model, rollouts_file), progress=Silent())
    found = [line["verify_difference"] for line in lines(verified, "steps.jsonl")]
    assert found[0] is None
    assert 0 <= found[1] < 1e-4
    one, other = (
        [(line["loss"], line["grad_norm"]) for line in lines(run, "steps.jsonl")] for run in (verified, plain)
    )
    assert one == other
    # Evaluation before the first step, two steps, evaluation after the last; plain numbers only.
    assert [(step, "loss" in scalars, "evaluation/loss" in scalars) for step, scalars in told] == [
        (0, False, True), (1, True, False), (2, True, False), (2, False, True),
    ]  # fmt: skip
    assert "verify_difference" not in told[1][1]
    assert told[2][1]["verify_difference"] == found[1]
    assert {"loss", "grad_norm", "lr", "packed_rows"} <= told[1][1].keys()
    assert all(isinstance(value, int | float) for _, scalars in told for value in scalars.values())


def test_each_callback_has_its_own_figures_and_its_name_is_told() -> None:
    """What one changes does not reach the next; the error keeps its cause."""
    seen: list[Scalars] = []

    def empties(step: int, scalars: Scalars) -> None:
        scalars.clear()

    class Fails:
        def __call__(self, step: int, scalars: Scalars) -> None:
            seen.append(scalars)
            raise ValueError("full")

    record = EvaluationRecord(step=3, requests=1, trained_tokens=2, loss=0.5, seconds=0.1)
    with pytest.raises(TrainingError, match=r"step 3: the callback .*Fails raised ValueError: full") as caught:
        tell([empties, Fails()], 3, evaluation_scalars(record))
    assert seen[0]["evaluation/loss"] == 0.5
    assert isinstance(caught.value.__cause__, ValueError)
    assert name_of(empties).endswith("empties")


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is not None, reason="the package is installed")
def test_without_its_package_tensorboard_is_refused_at_once(tiny_model: Path, rollouts_file: Path) -> None:
    """The package and the command that installs it are named, and no run folder is made."""
    with pytest.raises(ConfigError, match=r"needs the package 'tensorboard'.*pip install tensorboard"):
        train(config(tiny_model, rollouts_file, tensorboard=True), progress=Silent())
    assert not (rollouts_file.parent / "runs").exists()


def test_tensorboard_gets_every_figure(tiny_model: Path, rollouts_file: Path) -> None:
    """Where its package is installed, event files lie in the run folder."""
    pytest.importorskip("tensorboard")
    folder = train(config(tiny_model, rollouts_file, tensorboard=True), progress=Silent())
    assert list((folder / "tensorboard").iterdir())
