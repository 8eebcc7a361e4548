"""The learning rate of every optimizer step. Pure; imports no torch.

With W = ``warmup_steps``, T the steps of the whole run, m = ``min_lr_ratio`` and step i counted from 0:

    i < W    lr (i + 1) / (W + 1)
    i >= W   lr f(p), p = (i - W) / (T - W)

    constant   f = 1
    linear     f = 1 - (1 - m) p
    cosine     f = m + (1 - m) (1 + cos(pi p)) / 2

p reaches 1 one step after the last, so that with m = 0 no step is spent at a rate of 0. The cosine is that of SGDR
(Loshchilov and Hutter, arXiv 1608.03983, equation 5) without restarts.
"""

from __future__ import annotations

import math

from trainer_rank.training.config import OptimizerSection


def learning_rate(section: OptimizerSection, step: int, *, num_steps: int) -> float:
    """Return the learning rate of the 0-based optimizer step ``step`` in a run of ``num_steps``."""
    if step < section.warmup_steps:
        return section.lr * (step + 1) / (section.warmup_steps + 1)
    if section.schedule == "constant":
        return section.lr
    done = (step - section.warmup_steps) / max(1, num_steps - section.warmup_steps)
    falling = 1.0 - done if section.schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    return section.lr * (section.min_lr_ratio + (1.0 - section.min_lr_ratio) * falling)
