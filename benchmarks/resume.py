"""Runs killed without warning and resumed: is the newest checkpoint whole, and is the result that of one run?

A tiny random Llama with a LoRA adapter trains for eight steps, with a checkpoint after each, in a child process that is
killed with SIGKILL: every second time while a checkpoint is being written, else at a random moment between the first
line of its run folder and the end. One in three resumptions is killed again. What remains is resumed to the end and
compared with a run that was never killed.

Figures: ``runs``, ``kills``; ``kills_in_checkpoint``, those that left a half-written folder; ``valid``, runs whose
newest checkpoint was whole after every kill, every byte checked; ``equal``, runs with final weights and the loss and
gradient norm of each step equal in bits; ``seconds_checkpoint``, median seconds one checkpoint takes.
"""

from __future__ import annotations

from _harness import finish, pin_threads, quick, target

pin_threads(1)

import json  # noqa: E402
import multiprocessing  # noqa: E402
import random  # noqa: E402
import statistics  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
import warnings  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402
from transformers.utils.logging import disable_progress_bar  # noqa: E402

from trainer_rank.training.checkpoint import FOLDER, Checkpoint, open_checkpoint  # noqa: E402
from trainer_rank.training.config import TrainConfig  # noqa: E402
from trainer_rank.training.durable import PARTIAL  # noqa: E402
from trainer_rank.training.loop import train  # noqa: E402
from trainer_rank.training.progress import Silent  # noqa: E402

STEPS = 8
FORK = multiprocessing.get_context("fork")


def write_inputs(folder: Path) -> TrainConfig:
    """Write a model and rollouts into ``folder`` and return the configuration of the run."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaConfig(vocab_size=64, num_key_value_heads=2, max_position_embeddings=128, **sizes)
    LlamaForCausalLM(model).save_pretrained(folder / "model")
    draw = random.Random(0)
    with (folder / "data.jsonl").open("w", encoding="utf-8") as file:
        for group in range(STEPS):
            prompt = [draw.randrange(64) for _ in range(12)]
            for _ in range(3):
                tokens = prompt + [draw.randrange(64) for _ in range(6)]
                line = {"tokens": tokens, "trained": [0] * 12 + [1] * 6, "group": str(group)}
                file.write(json.dumps(line) + "\n")
    return TrainConfig.model_validate(
        {
            "model": {"path": str(folder / "model"), "lora": {"rank": 2, "alpha": 4.0}},
            "data": {"path": str(folder / "data.jsonl")},
            "optimizer": {"lr": 0.02, "schedule": "cosine"},
            "groups_per_step": 2,
            "steps": STEPS,
            "checkpoint_every": 1,
            "threads": 1,
        }
    )


def child(config: TrainConfig, resume: str | None) -> None:
    """Train in a process of its own; imports are the parent's already."""
    warnings.simplefilter("ignore", FutureWarning)
    train(config, progress=Silent(), resume=resume)


def start(config: TrainConfig, resume: str | None) -> Any:
    """Return the started process."""
    process = FORK.Process(target=child, args=(config, resume))
    process.start()
    return process


def killed(config: TrainConfig, run: Path, resume: str | None, draw: random.Random, *, seconds: float) -> bool:
    """Start or resume the run and kill it at a drawn moment; return whether it was still running then."""
    in_checkpoint = draw.random() < 0.5
    awaited = run / FOLDER / f".step-{draw.randint(1, STEPS):06d}{PARTIAL}" if in_checkpoint else run / "config.yaml"
    delay = draw.uniform(0, 0.004 if in_checkpoint else seconds)
    process = start(config, resume)
    while process.is_alive() and not awaited.exists():
        time.sleep(0.0002)
    time.sleep(delay)
    was_alive = process.is_alive()
    process.kill()
    process.join()
    return was_alive and process.exitcode != 0


def newest_is_whole(run: Path) -> bool:
    """Return whether the newest checkpoint loads; one that was never begun counts, too."""
    found = sorted((run / FOLDER).glob("step-*"))
    return not found or isinstance(open_checkpoint(found[-1]), Checkpoint)


def outcome(run: Path) -> tuple[bytes, list[tuple[int, float, float]]]:
    """Return the bytes of the adapter, and (step, loss, gradient norm) of each step."""
    lines = [json.loads(line) for line in (run / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [(line["step"], line["loss"], line["grad_norm"]) for line in lines]
    return (run / "adapter" / "adapter_model.safetensors").read_bytes(), steps


def finished(config: TrainConfig, resume: str | None) -> float:
    """Run or resume to the end and return the seconds it took; a run that fails ends the benchmark."""
    begin = time.perf_counter()
    process = start(config, resume)
    process.join()
    if process.exitcode:
        raise AssertionError(f"the run ended with status {process.exitcode}")
    return time.perf_counter() - begin


def checkpoint_seconds(config: TrainConfig, folder: Path) -> float:
    """Return the median seconds of one checkpoint of this model."""
    from trainer_rank.runtime.transformers import LoraConfig, TransformersRuntime
    from trainer_rank.session import TrainerRank
    from trainer_rank.training.checkpoint import Checkpoints

    lora = LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    rank = TrainerRank(TransformersRuntime.from_pretrained(config.model.path, lora=lora), verify_backend=False)
    entries: dict[str, Any] = {"config": {}, "data": "", "seconds": 0.0, "lengths": {}}
    times = []
    for step in range(9):
        begin = time.perf_counter()
        Checkpoints(folder, keep=2).write(rank, step=step, entries=entries)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def main() -> None:
    """Kill, resume, compare."""
    disable_progress_bar()
    draw, runs = random.Random(0), 3 if quick() else 50
    kills = partial = valid = equal = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = write_inputs(folder).model_copy(update={"run_dir": str(folder / "reference")})
        seconds = finished(config, None)
        wanted = outcome(folder / "reference" / "001")
        for number in range(runs):
            own = config.model_copy(update={"run_dir": str(folder / f"run-{number}")})
            run, resume, whole, killed_once = folder / f"run-{number}" / "001", None, True, False
            while not killed_once or draw.random() < 1 / 3:
                if (run / "summary.json").exists():
                    # It ended before its moment came; another one is drawn.
                    own = config.model_copy(update={"run_dir": str(folder / f"run-{number}-{time.monotonic_ns()}")})
                    run, resume = Path(own.run_dir) / "001", None
                if killed(own, run, resume, draw, seconds=seconds):
                    kills, killed_once = kills + 1, True
                    partial += bool(list((run / FOLDER).glob(f".*{PARTIAL}")))
                    whole = whole and newest_is_whole(run)
                resume = str(run) if (run / "config.yaml").exists() else None
            finished(own, resume)
            valid += whole
            same = outcome(run) == wanted
            equal += same
            print(f"run {number + 1:>2}: {'valid' if whole else 'DAMAGED'}, {'equal' if same else 'DIFFERENT'}")
        figures = {
            "runs": runs,
            "kills": kills,
            "kills_in_checkpoint": partial,
            "valid": valid,
            "equal": equal,
            "seconds_checkpoint": checkpoint_seconds(config, folder / "timed"),
        }
    finish("resume", figures, [target("valid", "eq", runs), target("equal", "eq", runs)])


if __name__ == "__main__":
    main()
