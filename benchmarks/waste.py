"""What CUDA's caching allocator wastes: whole training steps on simulated GPUs that are filled to the brim.

Random models (Llama, Qwen3; adapters and all weights; recompute full and none; hidden sizes 256 to 4,096) train three
steps on devices with just enough memory for what the largest pass is charged, a little more, and a little less. The
device runs a model of torch's allocator, cut segments and expandable ones. An admitted pass must never run out of
memory: what is kept back for waste (``meters.waste``) must be enough. Beside it the same steps with nothing kept back.

Figures: ``oom`` steps that ran out of memory after admission; ``oom_bare`` the same with nothing kept back; ``refused``
runs refused before, or between, passes.
"""

from __future__ import annotations

from _harness import finish, pin_threads, quick, target

pin_threads(1)

import random  # noqa: E402
import time  # noqa: E402
import warnings  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Iterator, Sequence  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from transformers import LlamaConfig, Qwen3Config  # noqa: E402

from trainer_rank import LoraConfig, Request, TrainerRank, TransformersRuntime  # noqa: E402
from trainer_rank.errors import TrainerRankMemoryError  # noqa: E402
from trainer_rank.memory import AllocatorSettings  # noqa: E402
from trainer_rank.meters import Device, Simulated  # noqa: E402
from trainer_rank.meters.waste import SEGMENTS_BYTES, waste_share  # noqa: E402
from trainer_rank.units import MIB  # noqa: E402

MODELS = 10
STEPS = 1 if quick() else 3
ROOM = (1.0, 1.02, 0.7)
"""Sizes of the device, as shares of what its largest pass is charged; only the first with nothing kept back."""
SEGMENT = 2 * MIB


def models(count: int) -> Iterator[tuple[str, TransformersRuntime, list[list[Request]]]]:
    """Yield (description, model without weights, requests of each step)."""
    draw = random.Random(1)
    for number in range(count):
        hidden = draw.choice([256, 512, 1024, 2048, 4096])
        family = Qwen3Config if number % 2 else LlamaConfig
        config = family(
            hidden_size=hidden, num_hidden_layers=draw.choice([2, 4, 6]), num_attention_heads=max(2, hidden // 128),
            num_key_value_heads=max(1, hidden // 512), head_dim=128, intermediate_size=hidden * draw.choice([2, 3]),
            max_position_embeddings=16_384, vocab_size=draw.choice([5_000, 50_000, 151_936]), tie_word_embeddings=False,
        )  # fmt: skip
        lora = LoraConfig(r=16, target_modules=["q_proj", "v_proj", "down_proj"]) if draw.random() < 0.7 else None
        recompute = draw.choice(["full", "none"])
        runtime = TransformersRuntime.from_config(config, lora=lora, recompute=recompute)
        scale = draw.choice([200, 1000, 3000])
        steps = [_requests(draw, scale) for _ in range(STEPS)]
        what = f"{config.model_type} {hidden} x {config.num_hidden_layers}, {'adapter' if lora else 'all weights'}"
        yield f"{what}, recompute {recompute}", runtime, steps


def _requests(draw: random.Random, scale: int) -> list[Request]:
    tokens = np.random.default_rng(draw.randrange(2**31))
    prompt = tokens.integers(0, 5000, draw.randint(1, 2 * scale))
    lengths = [draw.randint(scale // 8, scale) for _ in range(draw.choice([1, 2, 4, 8]))]
    rows = [np.concatenate([prompt, tokens.integers(0, 5000, length)]) for length in lengths]
    return [Request.next_token(row, trained=np.arange(row.size) >= prompt.size) for row in rows]


def charged(runtime: TransformersRuntime, steps: Sequence[list[Request]]) -> tuple[int, int]:
    """Return (bytes of the model, bytes the largest pass is charged when nothing has to be split)."""
    with Simulated("B200") as meter:
        meter.place([*runtime.model.parameters(), *runtime.model.buffers()])
        rank = TrainerRank(runtime, meter=meter, verify_backend=False)
        plans = [one for step in steps for one in rank.plan(step)]
        return meter.read().allocated_bytes, max(one.admission.charged_bytes for one in plans)


def train(
    runtime: TransformersRuntime, steps: Sequence[list[Request]], capacity: int, *, expandable: bool, bare: bool
) -> str:
    """Return how the steps end on a device of this capacity: ``runs``, ``refused`` or ``oom``."""
    for parameter in runtime.trainable_parameters():
        parameter.grad = None
    gpu = Device(name="test", usable_bytes=capacity, multiprocessors=132, context_bytes=MIB, cublas_bytes=0)
    settings = AllocatorSettings(expandable_segments=expandable)
    with Simulated(gpu, settings=settings, waste_fraction=0.0 if bare else None) as meter:
        try:
            meter.place([*runtime.model.parameters(), *runtime.model.buffers()])
            rank = TrainerRank(runtime, meter=meter, verify_backend=False)
            for step in steps:
                for micro_batch in rank.forward_micro_batches(step):
                    torch.stack([-one.logprobs.sum() for one in micro_batch.results]).sum().backward()
                    del micro_batch
                rank.optim_step(lr=1e-4)
        except TrainerRankMemoryError as error:
            return "refused" if error.refused else "oom"
    return "runs"


def main() -> None:
    """Fill every device; with ``--quick`` of one model."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    found: Counter[str] = Counter()
    for what, runtime, steps in models(1 if quick() else MODELS):
        begin = time.perf_counter()
        resident, needed = charged(runtime, steps)
        row = []
        for expandable in (False, True):
            for bare in (False, True):
                share = 0.0 if bare else waste_share(expandable)
                outcomes = []
                for room in ROOM[: 1 if bare else None]:
                    # A hundredth of the device is reserved for what the allocator does not know.
                    inside = (
                        -(-resident // SEGMENT) * SEGMENT
                        + int(needed * room * (1 + share))
                        + (0 if bare else SEGMENTS_BYTES)
                    )
                    capacity = int((inside + MIB) / 0.99) + 1
                    outcome = train(runtime, steps, capacity, expandable=expandable, bare=bare)
                    outcomes.append(outcome)
                    found[f"{'bare' if bare else 'kept'} {outcome}"] += 1
                row.append("/".join(outcomes))
        print(
            f"{what}: {needed / MIB:.0f} MiB charged; cut {row[0]} (bare {row[1]}); expandable {row[2]} "
            f"(bare {row[3]}); {time.perf_counter() - begin:.0f} s",
            flush=True,
        )
    runs = sum(count for name, count in found.items() if name.startswith("kept"))
    figures = {
        "runs": runs,
        "oom": found["kept oom"],
        "refused": found["kept refused"],
        "oom_bare": found["bare oom"],
        "refused_bare": found["bare refused"],
    }
    finish("waste", figures, [target("oom", "eq", 0)])


if __name__ == "__main__":
    main()
