"""One pass run for real, and the exact peak of what it allocated by the profiler's count."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from trainer_rank.executor.run import run_forward
from trainer_rank.planner import PassWork
from trainer_rank.runtime import Runtime


def run_pass(model: Runtime, work: PassWork, head_chunk_rows: int) -> None:
    """Run forward, a loss like the built-in ones and backward from cleared gradients, and clear them again."""
    result = run_forward(model, work, head_chunk_rows=head_chunk_rows, map_error=lambda error: error)
    parts = [logprobs.sum() * -1.0 for logprobs in result.logprobs]
    total = torch.stack(parts).sum()
    del parts
    total.backward()
    for parameter in model.trainable_parameters():
        parameter.grad = None


def profiled_peak(run: Callable[[], object]) -> int:
    """Return the peak of the profiler's allocator events over ``run``."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    found = profiler.profiler
    if found is None or found.kineto_results is None:
        raise AssertionError("the profiler returned nothing")
    events = [event for event in found.kineto_results.events() if event.name() == "[memory]"]
    changes = np.array([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    return int(np.cumsum(changes).max(initial=0))
