"""Recompute chosen pass by pass against recomputing everything, under a real cap.

    python benchmarks/elastic.py [--quick] [--output DIR]

A random 8-layer Qwen3 of hidden size 256, every weight trained, float32, one thread; one prompt of 512 tokens with
eight completions of 112: 1,408 packed rows. Budgets from the least with which all layers recomputed fit to what keeping
everything needs; the allocator fails anything beyond. Per budget, steps (forward, loss, backward) of
``recompute="auto"`` and of ``"full"`` with all the room there is, in turn; process CPU seconds.

Figures: ``oom`` of all steps; ``never_slower`` the largest, and ``fastest`` the smallest, median ratio of the time of
``auto`` over that of ``full``; ``recomputed_<i>`` how many layers ``auto`` recomputed under budget i.
"""

from __future__ import annotations

from _harness import finish, paired_medians, pin_threads, quick, target

pin_threads(1)

from dataclasses import replace  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from _capped import CappedMeter  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from trainer_rank import Request, TrainerRank, TransformersRuntime  # noqa: E402
from trainer_rank.errors import TrainerRankMemoryError  # noqa: E402
from trainer_rank.executor.dry_run import DryRunPricer  # noqa: E402
from trainer_rank.meters import open_meter  # noqa: E402
from trainer_rank.planner import pass_work  # noqa: E402

LAYERS = 8
PROMPT, COMPLETION = (48, 12) if quick() else (512, 112)
REPEATS = 1 if quick() else 7
BUDGETS = 2 if quick() else 6
CHUNK = 256
CALLER = 256


def runtime(recompute: str) -> TransformersRuntime:
    """Return the random model."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=256, num_hidden_layers=LAYERS, num_attention_heads=8, num_key_value_heads=2, head_dim=32,
        intermediate_size=768, vocab_size=1024, max_position_embeddings=8192, tie_word_embeddings=False,
    )  # fmt: skip
    return TransformersRuntime(Qwen3ForCausalLM._from_config(config), recompute=recompute)  # type: ignore[arg-type]


def batch() -> list[Request]:
    """Return the completions of one prompt."""
    draw = np.random.default_rng(0)
    prompt = draw.integers(0, 1024, PROMPT)
    rows = [np.concatenate([prompt, draw.integers(0, 1024, COMPLETION)]) for _ in range(8)]
    return [Request.next_token(row, trained=np.arange(row.size) >= PROMPT) for row in rows]


class Steps:
    """Steps of one rank."""

    def __init__(self, rank: TrainerRank, requests: list[Request]) -> None:
        self.rank, self.requests = rank, requests
        self.oom = 0

    def step(self) -> None:
        """Forward, loss and backward of every pass."""
        try:
            for micro_batch in self.rank.forward_micro_batches(self.requests):
                losses = [-one.logprobs.sum() for one in micro_batch.results if one.logprobs is not None]
                torch.stack(losses).sum().backward()
                del micro_batch, losses
        except TrainerRankMemoryError as error:
            if error.refused:
                raise
            self.oom += 1
        self.rank.zero_grad()


def main() -> None:
    """Run every budget."""
    requests = batch()
    elastic, full = runtime("auto"), runtime("full")
    dry = DryRunPricer(elastic, head_chunk_rows=CHUNK, caller_bytes_per_token=CALLER)
    work = pass_work(requests, range(len(requests)))
    least, most = (dry.price(replace(work, recomputed=k)).required_bytes for k in (LAYERS, 0))
    beside = elastic.facts.adam_state_bytes + elastic.facts.trainable_bytes
    figures: dict[str, float] = {"rows": work.batch.packed_rows, "least_mib": least / 2**20, "most_mib": most / 2**20}
    ratios, oom = [], 0
    with open_meter("cpu") as meter:

        def steps(model: TransformersRuntime, room: int) -> Steps:
            rank = TrainerRank(
                model, meter=CappedMeter(meter, room), head_chunk_rows=CHUNK, caller_bytes_per_token=CALLER,
                verify_backend=False,
            )  # fmt: skip
            return Steps(rank, requests)

        for number in range(BUDGETS):
            room = beside + least + (most - least) * number // (BUDGETS - 1)
            ours, theirs = steps(elastic, room), steps(full, beside + most)
            planned = ours.rank.plan(requests)
            chosen = max(work.recomputed or 0 for one in planned for work in one.works)
            found = paired_medians(ours.step, theirs.step, REPEATS)
            oom += ours.oom + theirs.oom
            ratios.append(found.ratio)
            figures[f"recomputed_{number}"] = chosen
            print(
                f"room for {room / 2**20:.0f} MiB: {len(planned)} passes, {chosen} of {LAYERS} layers recomputed, "
                f"{found.a_seconds:.2f} s against {found.b_seconds:.2f} s with all, ratio {found.ratio:.3f}",
                flush=True,
            )
    figures |= {"oom": oom, "never_slower": max(ratios), "fastest": min(ratios)}
    bounds = [target("oom", "eq", 0), target("never_slower", "le", 1.03), target("fastest", "le", 0.85)]
    finish("elastic", figures, bounds)


if __name__ == "__main__":
    main()
