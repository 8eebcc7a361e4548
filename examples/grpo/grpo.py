"""GRPO on a task with a checkable answer: sample, reward, train, again, with one model in one process.

    python examples/grpo/grpo.py [--iterations 12] [--seed 0]

Sampling is Transformers' ``generate``; the reward is the function ``reward`` below; training goes through a rank, which
packs the completions of a prompt as a tree and stays within the memory budget. Change ``PROMPTS`` and ``reward``, and
it is your own.
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from trainer_rank import LoraConfig, Request, TrainerRank, TransformersRuntime
from trainer_rank.training.losses import Sampled, grpo

MODEL = Path(".cache/smollm2-135m")
KINDS = (
    "animals", "fruits", "colours", "countries", "tools", "vegetables", "sports", "instruments", "cities", "trees",
    "birds", "flowers", "drinks", "jobs", "rivers", "spices",
)  # fmt: skip
PROMPTS = tuple(f"Name five {kind}. Answer with one line of five words, separated by commas." for kind in KINDS)


def reward(answer: str, *, ended: bool) -> float:
    """Return 1 for five different words on one line, separated by commas; less for something close; 0 if cut off."""
    if not ended:
        return 0.0
    words = [word.strip() for word in answer.strip().rstrip(".").split(",")]
    one_line = "\n" not in answer.strip()
    plain = all(re.fullmatch(r"[A-Za-z]+", word) for word in words)
    close = max(0.0, 1.0 - abs(len(words) - 5) / 5)
    return 0.4 * close + 0.2 * one_line + 0.4 * (len(words) == 5 and plain and len(set(words)) == 5 and one_line)


def sample(
    runtime: TransformersRuntime, tokenizer: Any, prompt: str, *, samples: int, longest: int
) -> tuple[list[int], list[list[int]]]:
    """Return the token ids of a prompt and of ``samples`` answers to it, each up to its end-of-turn token."""
    chat = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with runtime.generating() as model, torch.no_grad():
        found = model.generate(
            **ids, do_sample=True, temperature=1.0, top_k=0, num_return_sequences=samples, max_new_tokens=longest,
            pad_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
    begin = ids["input_ids"].shape[1]
    answers = []
    for row in found[:, begin:].tolist():
        stop = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
        answers.append(row[:stop])
    return ids["input_ids"][0].tolist(), answers


def old_logprobs(rank: TrainerRank, rows: list[tuple[list[int], list[int]]]) -> list[np.ndarray]:
    """Return float32 (N,) log-probs of every answer under the weights that sampled it, by position."""
    requests = [
        Request.next_token(prompt + answer, trained=[0] * len(prompt) + [1] * len(answer), no_grad=True)
        for prompt, answer in rows
    ]
    found: list[np.ndarray] = [np.empty(0)] * len(rows)
    for micro_batch in rank.forward_micro_batches(requests):
        for index, result in zip(micro_batch.indices, micro_batch.results, strict=True):
            assert result.logprobs is not None, "every request has labels"
            found[index] = result.logprobs.numpy()
    return found


def main() -> None:
    """Run the loop and print a line per iteration."""
    parser = argparse.ArgumentParser(description="GRPO on a task with a checkable answer")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=4, help="prompts per iteration")
    parser.add_argument("--samples", type=int, default=8, help="answers per prompt")
    parser.add_argument("--longest", type=int, default=32, help="tokens per answer")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--memory", default="3GiB", help="budget of the whole process")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    draw = np.random.default_rng(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    runtime = TransformersRuntime.from_pretrained(MODEL, lora=lora, dtype=torch.float32, recompute="none")
    rank = TrainerRank(runtime, memory_budget=options.memory)
    for iteration in range(options.iterations):
        begin = time.perf_counter()
        rows: list[tuple[list[int], list[int]]] = []
        rewards, advantages = [], []
        for number in draw.choice(len(PROMPTS), options.prompts, replace=False):
            prompt, answers = sample(
                runtime, tokenizer, PROMPTS[number], samples=options.samples, longest=options.longest
            )
            points = np.array(
                [
                    reward(
                        tokenizer.decode(answer, skip_special_tokens=True),
                        ended=answer[-1] == tokenizer.eos_token_id,
                    )
                    for answer in answers
                ]
            )
            rows += [(prompt, answer) for answer in answers]
            rewards += points.tolist()
            advantages += ((points - points.mean()) / (points.std(ddof=1) + 1e-4)).tolist()
        sampled_seconds = time.perf_counter() - begin
        requests = [
            Request.next_token(
                prompt + answer,
                trained=[0] * len(prompt) + [1] * len(answer),
                payload=Sampled(advantage=advantage, old_logprobs=old),
            )
            for (prompt, answer), advantage, old in zip(rows, advantages, old_logprobs(rank, rows), strict=True)
        ]
        packed = logical = 0
        for micro_batch in rank.forward_micro_batches(requests, normalisation="sequence-mean"):
            grpo(micro_batch).backward()
            packed += micro_batch.stats.packed_rows
            logical += micro_batch.stats.logical_tokens
        rank.optim_step(lr=options.lr, max_grad_norm=1.0)
        perfect = sum(one > 0.99 for one in rewards)
        print(
            f"iteration {iteration + 1:2}: reward {np.mean(rewards):.2f}, perfect {perfect}/{len(rewards)}, "
            f"{logical:,} tokens in {packed:,} rows, sampled {sampled_seconds:.1f} s, "
            f"trained {time.perf_counter() - begin - sampled_seconds:.1f} s",
            flush=True,
        )
    print("an answer now:", repr(tokenizer.decode(rows[0][1], skip_special_tokens=True)))


if __name__ == "__main__":
    main()
