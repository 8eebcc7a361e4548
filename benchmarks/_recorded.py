"""Real passes as records that two pricers can be asked about afterwards: what they were, cost and needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer_rank import Request, TrainerRank, TransformersRuntime
from trainer_rank.executor.scalars import with_scalars
from trainer_rank.memory import ForwardShape, MemorySignature, Profile, ProfileModel, Residual, Seen
from trainer_rank.memory.profile import price_forward
from trainer_rank.meters import Meter
from trainer_rank.report import AdmissionRecord, Record

HEAD_CHUNK_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One pass of a training run.

    Attributes:
        model: Which model, and how it is trained.
        ratio: Logical tokens by packed rows.
        shape: The pass as the ``profile`` pricer sees it.
        known: The model as that pricer sees it.
        signature: What must agree for that pricer to use what it learned.
        traced_bytes: The ``envelope`` pricer's price with nothing learned.
        peak_bytes, live_bytes: Measured.
    """

    model: str
    ratio: float
    shape: ForwardShape
    known: ProfileModel
    signature: str
    traced_bytes: int
    peak_bytes: int
    live_bytes: int | None

    @property
    def seen(self) -> Seen:
        """The pass as an observation of the ``envelope`` pricer."""
        return Seen(
            packed_rows=self.shape.packed_rows, logical_tokens=self.shape.logical_tokens,
            predicted_bytes=self.traced_bytes, peak_bytes=self.peak_bytes,
        )  # fmt: skip

    def by_envelope(self, learned: Sequence[Recorded]) -> int:
        """Return the ``envelope`` pricer's price after these observations."""
        residual = Residual().observe(*(one.seen for one in learned))
        return self.traced_bytes + residual.extra_bytes(
            self.shape.packed_rows, self.shape.logical_tokens, self.traced_bytes
        )

    def by_profile(self, learned: Sequence[Recorded]) -> int:
        """Return the ``profile`` pricer's price after these observations."""
        profile: Profile | None = None
        for one in learned:
            if one.signature == self.signature:
                found = Profile.of(one.shape, peak_bytes=one.peak_bytes, live_bytes=one.live_bytes)
                profile = found if profile is None else profile.join(found)
        return price_forward(self.known, self.shape, profile).required_bytes


def group(ratio: float, rows: int, vocabulary: int, seed: int) -> list[Request]:
    """Return requests of about so many packed rows and this sharing ratio: branches of equal length on one prompt."""
    draw = np.random.default_rng(seed)
    branches = 4 if ratio <= 1 else max(2, round(ratio * 1.25))
    # n branches of s on a prompt of p are p + n s rows for n (p + s) tokens.
    prompt = 0 if ratio <= 1 else round(rows * (ratio - 1) / (branches - 1))
    length = max(2, (rows - prompt) // branches)
    start = draw.integers(0, vocabulary, prompt)
    found = []
    for _ in range(branches):
        tokens = np.concatenate([start, draw.integers(0, vocabulary, length)])
        found.append(Request.next_token(tokens, trained=np.arange(tokens.size) >= prompt))
    return found


def summed(results: Iterable[Any]) -> Tensor:
    """A policy-gradient-like loss: log-probs weighed by a clipped ratio to fixed ones."""
    parts = []
    for result in results:
        old = result.logprobs.detach()
        parts.append((torch.clamp(torch.exp(result.logprobs - old), max=4.0).detach() * result.logprobs).sum() * -1.0)
    return torch.stack(parts).sum()


def record(
    name: str, runtime: TransformersRuntime, meter: Meter, batches: Sequence[Sequence[Request]]
) -> Iterator[Recorded]:
    """Train on each batch in one pass and yield its record, the optimizer stepping in between."""
    records: list[Record] = []
    rank = TrainerRank(
        runtime, meter=meter, head_chunk_rows=HEAD_CHUNK_ROWS, pricing="profile", verify_backend=False,
        on_decision=records.append,
    )  # fmt: skip
    rank.trace_loss(lambda micro_batch: summed(micro_batch.results), batches[0])
    for number, batch in enumerate((batches[0], *batches)):
        (planned,) = rank.plan(batch)
        (work,) = planned.works
        traced = with_scalars(rank._pricer.price(work), runtime, work).required_bytes
        records.clear()
        for micro_batch in rank.forward_micro_batches(batch):
            summed(micro_batch.results).backward()
            del micro_batch
        rank.optim_step(lr=1e-5)
        if not number:
            # Once before: the optimizer's state, and what libraries allocate at first use, is no pass's.
            continue
        admission, observed = records[0], rank.last_observation
        assert isinstance(admission, AdmissionRecord)
        assert observed is not None
        (forward,) = admission.pricing["forwards"]
        signature = MemorySignature.from_json(forward["signature"])
        yield Recorded(
            model=name,
            ratio=forward["logical_tokens"] / forward["packed_rows"],
            shape=ForwardShape(
                packed_rows=forward["packed_rows"], logical_tokens=forward["logical_tokens"],
                output_bytes=forward["output_bytes"], segments=forward["segments"], packed=forward["packed_priced"],
            ),
            known=ProfileModel(**admission.pricing["model"]),
            signature=repr(signature),
            traced_bytes=traced,
            peak_bytes=observed.peak_bytes,
            live_bytes=observed.retained_bytes,
        )  # fmt: skip
