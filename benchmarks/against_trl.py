"""GRPO through TRL's trainer and through a rank: the same model, data and updates, on the CPU.

    python benchmarks/against_trl.py [--quick] [--output DIR]

SmolLM2-135M with a LoRA adapter, float32, one thread. Two groups of eight completions of 40 tokens under prompts of
240, cut from real tool-use conversations: 4,480 logical tokens an update, sharing ratio 4. Recorded old log-probs with
noise, so that ratios differ from 1 and some are clipped; advantages of zero mean in each group. Per-sequence means,
clipping at 0.2, AdamW, a global norm of 1. Each side runs in a process of its own: three updates, of which the first
warms up.

TRL runs in an environment of its own (``.trl``, made on first use, over this one's torch and Transformers), with its
generation step replaced by the recorded completions (``_trl_rival``); the rest is its own. Of TRL's settings these run:
a group a pass with recomputation (its default) and without, and one sequence a pass with recomputation, its least
memory; each with glibc's allocator as it is and with one that keeps large blocks instead of returning their pages, as a
rank's does.

Figures: ``speedup`` is TRL's fastest setting, in CPU seconds of an update, over the rank's; ``memory_ratio`` the rank's
peak resident set over that of the same TRL run; ``memory_ratio_least`` over TRL's least at any setting. ``loss_error``
is the largest difference of an update's loss, ``weights_error`` of the trained weights after the last update, in norm,
over the norm of what training changed.
"""

from __future__ import annotations

from _harness import finish, pin_threads, quick, target

pin_threads(1)

import json  # noqa: E402
import math  # noqa: E402
import os  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from _peak import peak_resident_bytes, reset_peak  # noqa: E402
from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from trainer_rank import Request, TrainerRank, TransformersRuntime  # noqa: E402
from trainer_rank.training.losses import Sampled, ppo_clip  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / ".cache" / "smollm2-135m"
DATA = ROOT / ".cache" / "demo" / "train.jsonl"
ENVIRONMENT = ROOT / ".trl"
TRL = "trl==1.16.0"

UPDATES, GROUPS, COMPLETIONS = (2, 1, 2) if quick() else (3, 2, 8)
PROMPT, COMPLETION = (18, 4) if quick() else (240, 40)
LEARNING_RATE = 1e-4
MAX_GRAD_NORM = 1.0
EPSILON = 0.2
BUDGET = "3GiB"
"""Of the rank: everything resident in its process."""

KEEP_PAGES = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Has glibc keep what is freed; 32 MiB is the most it takes as the first."""

SETTINGS = [(COMPLETIONS, True), (COMPLETIONS, False), (1, True)]
"""Sequences a pass, and recomputation, of TRL's runs."""


def recorded_updates() -> list[list[dict[str, Any]]]:
    """Return the groups of each update: prompt, completions, advantages, old log-probs still to be drawn."""
    rows = [json.loads(line)["tokens"] for line in DATA.read_text(encoding="utf-8").splitlines()]
    rows = list({tuple(row[:PROMPT]): row for row in rows if len(row) > PROMPT}.values())
    text = [token for row in rows for token in row[PROMPT:]]
    draw = np.random.default_rng(0)
    updates = []
    for update in range(UPDATES):
        groups = []
        for group in range(GROUPS):
            starts = draw.integers(0, len(text) - COMPLETION, COMPLETIONS)
            advantages = draw.standard_normal(COMPLETIONS)
            advantages = (advantages - advantages.mean()) / advantages.std()
            groups.append(
                {
                    "prompt": rows[(update * GROUPS + group) % len(rows)][:PROMPT],
                    "completions": [text[start : start + COMPLETION] for start in starts],
                    "advantages": advantages.astype(np.float32).tolist(),
                }
            )
        updates.append(groups)
    return updates


def requests_of(groups: list[dict[str, Any]], *, no_grad: bool = False) -> list[Request]:
    """Return the requests of an update, completions trained; its payload holds advantage and old log-probs."""
    found = []
    for group in groups:
        prompt = group["prompt"]
        for number, completion in enumerate(group["completions"]):
            trained = [0] * len(prompt) + [1] * len(completion)
            payload = None
            if not no_grad:
                # Position i scores token i + 1.
                old = np.zeros(len(trained), dtype=np.float32)
                old[len(prompt) - 1 : -1] = group["old_logprobs"][number]
                payload = Sampled(advantage=group["advantages"][number], old_logprobs=old)
            found.append(Request.next_token(prompt + completion, trained=trained, no_grad=no_grad, payload=payload))
    return found


def draw_old_logprobs(updates: list[list[dict[str, Any]]]) -> None:
    """Score every completion with the model as it is, and add noise: a policy a little older."""
    rank = TrainerRank(TransformersRuntime.from_pretrained(MODEL, dtype=torch.float32), memory_budget="16GiB")
    draw = np.random.default_rng(1)
    for groups in updates:
        requests = requests_of(groups, no_grad=True)
        found: dict[int, list[float]] = {}
        for micro_batch in rank.forward_micro_batches(requests):
            for index, result in zip(micro_batch.indices, micro_batch.results, strict=True):
                exact = result.logprobs[PROMPT - 1 : PROMPT - 1 + COMPLETION].numpy()
                found[index] = np.minimum(0.0, exact + 0.15 * draw.standard_normal(COMPLETION)).tolist()
        for place, group in enumerate(groups):
            group["old_logprobs"] = [found[place * COMPLETIONS + number] for number in range(COMPLETIONS)]


def make_adapter(folder: Path) -> None:
    """Write a LoRA adapter whose every weight is drawn, so that all of them have gradients."""
    torch.manual_seed(0)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        LoraConfig(r=16, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]),
    )
    model.save_pretrained(folder)


def run_rank(task: dict[str, Any]) -> dict[str, Any]:
    """Run the task's updates through a rank, in this process."""
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32)
    model = PeftModel.from_pretrained(model, task["adapter"], is_trainable=True)
    runtime = TransformersRuntime(model, recompute="full" if task["recompute"] else "none")
    rank = TrainerRank(runtime, memory_budget=task["budget"])
    seconds, losses = [], []
    for groups in task["updates"]:
        begin = time.process_time()
        losses.append(0.0)
        for micro_batch in rank.forward_micro_batches(requests_of(groups), normalisation="sequence-mean"):
            loss = ppo_clip(micro_batch, epsilon_low=EPSILON, epsilon_high=EPSILON)
            losses[-1] += float(loss.detach())
            loss.backward()
        rank.optim_step(lr=LEARNING_RATE, max_grad_norm=MAX_GRAD_NORM, weight_decay=0.0)
        seconds.append(time.process_time() - begin)
        if len(seconds) == 1:
            reset_peak()
    torch.save({name: one.detach() for name, one in model.named_parameters() if one.requires_grad}, task["weights"])
    return {"seconds": seconds, "losses": losses, "peak_resident_bytes": peak_resident_bytes()}


def make_environment() -> bool:
    """Make TRL's environment over this one on first use; return whether it is there."""
    python = ENVIRONMENT / "bin" / "python"
    if python.exists():
        return True
    if quick():
        return False
    print(f"installing {TRL} into {ENVIRONMENT.name}/", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
    (site,) = ENVIRONMENT.glob("lib/python*/site-packages")
    # torch and Transformers are the rank's own, so that both sides run the same kernels.
    (site / "project.pth").write_text(f"{Path(torch.__file__).parents[1]}\n", encoding="utf-8")
    subprocess.run([str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", TRL], check=True)
    return True


def run_child(command: list[str], task: dict[str, Any], folder: Path, *, keep_pages: bool) -> dict[str, Any]:
    """Run one side in a process of its own and return what it prints last."""
    path = folder / "task.json"
    path.write_text(json.dumps(task), encoding="utf-8")
    environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error", **(KEEP_PAGES if keep_pages else {})}
    done = subprocess.run([*command, str(path)], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[1]} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "weights": torch.load(task["weights"])}


def weights_error(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], adapter: Path) -> float:
    """Return the norm of the difference of the weights over the norm of what training changed."""
    from safetensors.torch import load_file

    begin = load_file(adapter / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys(), "both sides train the same parameters"
    moved = off = 0.0
    for name, tensor in theirs.items():
        moved += float((tensor - begin[name.replace(".default", "")]).double().square().sum())
        off += float((tensor - ours[name]).double().square().sum())
    return math.sqrt(off / moved)


def median(run: dict[str, Any]) -> float:
    """Return the median CPU seconds of the updates that count."""
    return float(np.median(run["seconds"][1:]))


def main() -> None:
    """Run both sides, or say why not."""
    if not (MODEL / "config.json").is_file() or not make_environment():
        print("TRL's environment or the model is missing; run without --quick, after: make prepare")
        finish("against_trl", {"skipped": 1}, [])
    updates = recorded_updates()
    draw_old_logprobs(updates)
    rows = {"trl": [], "rank": []}  # type: dict[str, list[dict[str, Any]]]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_adapter(folder / "adapter")
        common = {
            "model": str(MODEL), "adapter": str(folder / "adapter"), "scratch": str(folder / "scratch"),
            "weights": str(folder / "weights.pt"), "updates": updates, "lr": LEARNING_RATE, "epsilon": EPSILON,
            "max_grad_norm": MAX_GRAD_NORM, "budget": BUDGET,
        }  # fmt: skip
        for recompute in (True, False):
            task = {**common, "recompute": recompute}
            run = run_child([sys.executable, __file__, "--rank"], task, folder, keep_pages=False)
            rows["rank"].append(show("rank", run, recompute=recompute))
        for per_pass, recompute in SETTINGS[:1] if quick() else SETTINGS:
            for keep_pages in (False,) if quick() else (False, True):
                task = {**common, "recompute": recompute, "sequences_per_pass": per_pass}
                command = [str(ENVIRONMENT / "bin" / "python"), str(ROOT / "benchmarks" / "_trl_rival.py")]
                run = run_child(command, task, folder, keep_pages=keep_pages)
                rows["trl"].append(
                    show("TRL", run, sequences_a_pass=per_pass, recompute=recompute, pages_kept=keep_pages)
                )
        ours, theirs = (min(rows[side], key=median) for side in ("rank", "trl"))
        losses = np.array([run["losses"] for side in rows.values() for run in side])
        error = max(weights_error(one["weights"], theirs["weights"], folder / "adapter") for one in rows["rank"])
    least = min(run["peak_resident_bytes"] for run in rows["trl"])
    packed = GROUPS * (PROMPT + COMPLETIONS * COMPLETION)
    figures = {
        "sharing_ratio": GROUPS * COMPLETIONS * (PROMPT + COMPLETION) / packed,
        "speedup": median(theirs) / median(ours),
        "memory_ratio": ours["peak_resident_bytes"] / theirs["peak_resident_bytes"],
        "memory_ratio_least": min(run["peak_resident_bytes"] for run in rows["rank"]) / least,
        "loss_error": float(np.ptp(losses, axis=0).max()),
        "weights_error": error,
        "trl_seconds": median(theirs),
        "rank_seconds": median(ours),
    }
    bounds = [
        target("speedup", "ge", 2.0),
        target("memory_ratio", "le", 0.7),
        target("loss_error", "le", 1e-4),
    ]
    finish("against_trl", figures, bounds)


def show(side: str, run: dict[str, Any], **setting: object) -> dict[str, Any]:
    """Print a run and return it."""
    what = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in setting.items())
    print(
        f"{side:4} {what}: {median(run):.1f} s an update, peak {run['peak_resident_bytes'] / 2**30:.2f} GiB, losses "
        + " ".join(f"{loss:.6f}" for loss in run["losses"]),
        flush=True,
    )
    return run


if __name__ == "__main__":
    if "--rank" in sys.argv:
        print(json.dumps(run_rank(json.loads(Path(sys.argv[-1]).read_text(encoding="utf-8")))))
    else:
        main()
