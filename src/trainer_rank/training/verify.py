"""Packed against alone, now and then during a run: what a shared prefix must not change.

Requests of the step are drawn at random from the run's seed and the step's number, so a resumed run draws the same.
They run again alone and without gradient before the weights move; the gradient of the step is not touched.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from torch import Tensor

from trainer_rank.requests import Request
from trainer_rank.session import MicroBatch, TrainerRank
from trainer_rank.training.config import TrainConfig

LIMITS: Final = {"float32": 1e-3, "bfloat16": 0.25}
"""Above these the difference is warned of, by dtype. Float32 has the bound of the self-test; bfloat16 keeps 8 bits, and
log-probabilities of several units then differ in their second decimal without any fault."""


class Verification:
    """One step's verification; of no request in a step that is not due."""

    def __init__(self, config: TrainConfig, requests: Sequence[Request], *, step: int) -> None:
        self._limit = LIMITS[config.model.dtype]
        self._requests = requests
        self._step = step
        self._packed: dict[int, Tensor] = {}
        scored = [index for index, request in enumerate(requests) if request.num_trained]
        due = config.verify_every is not None and step % config.verify_every == 0
        drawn = random.Random(f"{config.seed} {step}").sample(scored, min(config.verify_requests, len(scored)))
        self._chosen = frozenset(drawn if due else ())

    def keep(self, micro_batch: MicroBatch) -> None:
        """Keep the packed log-probabilities of the chosen requests, float32 on the CPU."""
        for index, result in zip(micro_batch.indices, micro_batch.results, strict=True):
            if index in self._chosen and result.logprobs is not None:
                self._packed[index] = result.logprobs.detach().cpu().clone()

    def difference(self, rank: TrainerRank) -> float | None:
        """Return the largest absolute difference of a log-probability; None when nothing was chosen.

        Raises:
            TrainerRankMemoryError: A request cannot run alone.
        """
        if not self._packed:
            return None
        largest = 0.0
        for index, packed in sorted(self._packed.items()):
            for micro_batch in rank.forward_micro_batches([replace(self._requests[index], no_grad=True)]):
                alone = micro_batch.results[0].logprobs
                assert alone is not None, "only requests that score something are chosen"
                largest = max(largest, float((alone.cpu() - packed).abs().max()))
                del alone, micro_batch
        if not largest <= self._limit:
            warnings.warn(
                f"step {self._step}: packed and alone, log-probabilities of requests {sorted(self._packed)} differ by "
                f"{largest:.3g}, more than {self._limit:g}; training goes on, and what differs should be found",
                RuntimeWarning,
                stacklevel=2,
            )
        return largest
