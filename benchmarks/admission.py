"""Random workloads under random budgets, run for real with the allocator capped at the budget.

Each workload is a tiny model, random requests and a budget between a tenth of what the whole batch needs in one pass
and three times that. It is trained for two steps: every micro-batch forward, loss, backward, then AdamW. The counting
allocator fails any allocation past the budget, so an admission that was wrong is a real out-of-memory error. A tenth of
the workloads run in child processes whose data segment the system limits (``RLIMIT_DATA``) to what it was at admission
plus 1.06 times the available bytes.

A refused workload is run anyway, one request at a time, under the same cap: when that succeeds, the refusal was wrong.
Every rank begins with what the ranks before it learned of its model, through one store.

On a sample the longest request that is admitted is compared with the longest that really runs, by bisection.

Figures: ``oom`` after admission, ``refused_but_runs`` (share of all workloads), ``utilisation`` (smallest ratio of the
packed rows admitted to the packed rows that run), ``passes`` executed after admission, counts by outcome,
``child_workloads`` and ``child_oom``, and ``learned_signatures`` of which a price was short at least once.
"""

from __future__ import annotations

from _harness import finish, pin_threads, quick, target

pin_threads(1)

import gc  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import resource  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import warnings  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from _capped import CappedMeter  # noqa: E402
from _passes import EVERY_PROJECTION, Case, cases, requests, runtime  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: E402

from trainer_rank import Request, TrainerRank, TrainerRankMemoryError, TransformersRuntime  # noqa: E402
from trainer_rank.memory import Price, Residual, Term  # noqa: E402
from trainer_rank.meters import Meter, open_meter  # noqa: E402
from trainer_rank.store import LearnedStore  # noqa: E402

WORKLOADS = 1 if quick() else 270
CHILDREN, PER_CHILD = (1, 1) if quick() else (3, 10)
SAMPLE = 1 if quick() else 24
SHAPES = ("single", "tiny", "labels", "apart", "flat", "ragged", "wide", "chain", "random")
MIB = 1024**2
EXECUTED: Counter[str] = Counter()
"""Micro-batches that ran after an honest admission, workloads that ran to their end only."""


def models() -> list[TransformersRuntime]:
    """Return one tiny model per way to train."""
    ways: dict[tuple[str, str, str], Case] = {}
    for case in cases():
        ways.setdefault((case.family, case.trained, case.recompute), case)
    return [runtime(case) for case in list(ways.values())[: 2 if quick() else None]]


def open_capped(model: TransformersRuntime, extra_bytes: int) -> Meter:
    """Return a meter that offers ``extra_bytes`` beyond the model, of which earlier runs leave no gradients."""
    for parameter in model.trainable_parameters():
        parameter.grad = None
    gc.collect()
    return CappedMeter(open_meter("cpu", cpu="counting"), extra_bytes)


def rank_for(model: TransformersRuntime, meter: Meter, store: LearnedStore | None = None) -> TrainerRank:
    return TrainerRank(
        model, meter=meter, head_chunk_rows=64, caller_bytes_per_token=16, verify_backend=False, store=store
    )


def train(rank: TrainerRank, calls: Sequence[Sequence[Request]]) -> int:
    """Take two steps over all calls: from the second on, the optimizer's state stands beside every pass.

    Return how many micro-batches ran.
    """
    count = 0
    for _ in range(2):
        for batch in calls:
            for micro_batch in rank.forward_micro_batches(batch):
                parts = [result.logprobs.sum() * -1.0 for result in micro_batch.results if result.logprobs is not None]
                loss = torch.stack(parts).sum()
                del parts
                loss.backward()
                count += 1
        rank.optim_step(lr=1e-5)
    return count


def admit_all(rank: TrainerRank) -> None:
    """Have the rank price every pass at nothing, so that only the cap decides."""
    free = Price(required_bytes=0, retained_bytes=0, terms=(Term(name="nothing", num_bytes=0),), phase="none")
    rank._pricer.price = lambda work: free  # type: ignore[method-assign]
    rank._gate.pending = lambda *, split: ()  # type: ignore[method-assign]


def outcome(model: TransformersRuntime, extra_bytes: int, calls: Sequence[Sequence[Request]], *, honest: bool) -> str:
    """Train under a budget; return ``runs``, ``refused`` or ``oom``."""
    found = _outcome(model, extra_bytes, calls, honest=honest)
    if found == "oom":
        # What a failed backward leaves in autograd's hands goes with the next backward. It would otherwise go in the
        # middle of the next workload and give that more room than its budget.
        with open_meter("cpu", cpu="counting") as meter:
            train(rank_for(model, meter), [[Request.next_token([1, 2, 3])]])
    return found


def _outcome(model: TransformersRuntime, extra_bytes: int, calls: Sequence[Sequence[Request]], *, honest: bool) -> str:
    with open_capped(model, extra_bytes) as meter:
        try:
            rank = rank_for(model, meter, LearnedStore() if honest else None)
            if not honest:
                admit_all(rank)
            count = train(rank, calls)
            EXECUTED["passes"] += count if honest else 0
        except TrainerRankMemoryError as error:
            return "refused" if error.refused else "oom"
        except (RuntimeError, MemoryError) as error:
            print(f"  {type(error).__name__}: {str(error)[:160]}")
            return "oom"
    return "runs"


def whole_step_bytes(model: TransformersRuntime, batch: Sequence[Request]) -> int:
    """Return what one step over a batch in a single pass is predicted to need."""
    seen: list[int] = []
    with open_meter("cpu", cpu="counting") as meter:
        rank = rank_for(model, meter)
        for micro_batch in rank.forward_micro_batches(batch):
            seen.append(micro_batch.stats.required_bytes)
    return max(seen) + model.facts.adam_state_bytes


def workload(draw: np.random.Generator, models: Sequence[TransformersRuntime]) -> tuple[int, list[Request]]:
    """Return the number of a model and a random batch for it."""
    number = int(draw.integers(len(models)))
    shape = str(draw.choice(SHAPES))
    return number, requests(shape, int(draw.integers(10**6)), models[number].facts.vocabulary_size)


def run_workloads(made: Sequence[TransformersRuntime]) -> Counter[str]:
    draw = np.random.default_rng(11)
    found: Counter[str] = Counter()
    for number in range(WORKLOADS):
        which, batch = workload(draw, made)
        extra = int(whole_step_bytes(made[which], batch) * 10 ** draw.uniform(-1.0, 0.5))
        result = outcome(made[which], extra, [batch], honest=True)
        if result == "refused" and outcome(made[which], extra, [[one] for one in batch], honest=False) == "runs":
            result = "refused_but_runs"
            print(f"workload {number}: refused {extra} bytes but runs: model {which}, {len(batch)} requests")
        found[result] += 1
        if number % 50 == 49:
            print(f"{number + 1} workloads: {dict(found)}", flush=True)
    return found


def longest(runs: Callable[[int], bool], limit: int) -> int:
    """Return the largest length up to ``limit`` that runs, 0 when none does."""
    low, high = 0, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if runs(middle) else (low, middle)
    return low


def utilisations(made: Sequence[TransformersRuntime]) -> list[float]:
    """Return the ratio of the longest request admitted to the longest that runs, for a sample of budgets."""
    draw = np.random.default_rng(12)
    ratios = []
    for _ in range(SAMPLE):
        model = made[int(draw.integers(len(made)))]
        tokens = draw.integers(0, model.facts.vocabulary_size, 1500)

        def calls(length: int, tokens: Any = tokens) -> list[list[Request]]:
            return [[Request.next_token(tokens[:length], trained=np.arange(length) >= length // 2)]]

        extra = whole_step_bytes(model, calls(int(draw.integers(300, 1300)))[0])
        admitted = longest(lambda n: n > 3 and outcome(model, extra, calls(n), honest=True) == "runs", 1500)  # noqa: B023
        running = longest(lambda n: n > 3 and outcome(model, extra, calls(n), honest=False) == "runs", 1500)  # noqa: B023
        ratios.append(admitted / running)
        print(f"longest admitted {admitted}, longest that runs {running}: {admitted / running:.4f}", flush=True)
    return ratios


def larger_model() -> TransformersRuntime:
    """Return a model whose passes need tens of MiB, far more than Python's own heap may grow by."""
    config = LlamaConfig(
        hidden_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, intermediate_size=1408,
        vocab_size=8000, max_position_embeddings=8192, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    return TransformersRuntime(
        get_peft_model(model, LoraConfig(r=8, target_modules=EVERY_PROJECTION)), recompute="none"
    )


def data_bytes() -> int:
    """Return the size of this process's data segment, private mappings included."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData"))


def child(seed: int) -> None:
    """Run workloads under the system's own limit; print the outcomes as one JSON document."""
    draw = np.random.default_rng(100 + seed)
    model, found = larger_model(), Counter[str]()
    warm = requests("flat", 1, 8000)
    outcome(model, 1024 * MIB, [warm], honest=True)
    for _ in range(PER_CHILD):
        shape = str(draw.choice(("flat", "apart", "ragged", "chain", "random")))
        batch = requests(shape, int(draw.integers(10**6)), 8000)
        extra = max(24 * MIB, int(whole_step_bytes(model, batch) * 10 ** draw.uniform(-0.5, 0.4)))
        gc.collect()
        with open_capped(model, extra) as meter:
            rank = rank_for(model, meter)
            available = meter.read().available_bytes
            limit = data_bytes() + int(1.06 * available)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
            try:
                train(rank, [batch])
                result = "runs"
            except TrainerRankMemoryError as error:
                result = "refused" if error.refused else "oom"
            except (RuntimeError, MemoryError):
                result = "oom"
            finally:
                resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        found[result] += 1
        del rank
    print(json.dumps(found))


def run_children() -> Counter[str]:
    total: Counter[str] = Counter()
    for seed in range(CHILDREN):
        quickly = ["--quick"] if quick() else []
        done = subprocess.run(
            [sys.executable, __file__, "--child", str(seed), *quickly], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"a child process failed:\n{done.stdout}\n{done.stderr}")
        found = json.loads(done.stdout.splitlines()[-1])
        print(f"child {seed}: {found}", flush=True)
        total.update(found)
    return total


def main() -> None:
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")
    if "--child" in sys.argv:
        child(int(sys.argv[sys.argv.index("--child") + 1]))
        return
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = os.environ["XDG_DATA_HOME"] = cache
        made = models()
        inside = run_workloads(made)
        ratios = utilisations(made)
        outside = run_children()
        entries = LearnedStore().entries()
        learned = sum(Residual.from_json(one.value).is_short for one in entries)
    total = sum(inside.values()) + sum(outside.values())
    figures = {
        "workloads": total,
        "oom": inside["oom"] + outside["oom"],
        "refused_but_runs": inside["refused_but_runs"] / total,
        "utilisation": min(ratios),
        "utilisation_median": float(np.median(ratios)),
        "passes": EXECUTED["passes"],
        "learned_signatures": learned,
        "admitted": inside["runs"] + outside["runs"],
        "refused": inside["refused"] + outside["refused"],
        "child_workloads": sum(outside.values()),
        "child_oom": outside["oom"],
    }
    targets = [target("oom", "eq", 0), target("utilisation", "ge", 0.95), target("refused_but_runs", "le", 0.005)]
    targets.append(target("passes", "ge", 1000))
    finish("admission", figures, targets)


if __name__ == "__main__":
    main()
