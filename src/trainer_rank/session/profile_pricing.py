"""Prices forwards by what was learned per packed row (``memory.profile``), and learns from what they needed.

What decides how a forward is priced is read from the live model each time: recompute and training mode can change
between two forwards. What was observed takes effect when the next call begins, so that prices within a call agree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from trainer_rank.errors import ConfigError
from trainer_rank.executor.envelope_pricer import EnvelopePricer
from trainer_rank.executor.scalars import with_scalars
from trainer_rank.memory import (
    ForwardShape,
    LowerBound,
    MemorySignature,
    ModelFacts,
    Observation,
    Price,
    ProfileBook,
    ProfileModel,
    combine,
    packed_priced,
)
from trainer_rank.memory.profile import LOGICAL_CHARGE, price_forward, required_at_least, retained_at_least
from trainer_rank.memory.signature import request_key
from trainer_rank.planner import PassWork
from trainer_rank.prefix import Layout, build_tree, layout_rows
from trainer_rank.requests import Request
from trainer_rank.runtime import Runtime
from trainer_rank.session.pricing import CallerAllowance, Forward, Pricer, Pricing, left_bytes
from trainer_rank.session.residual_pricing import ResidualPricing
from trainer_rank.session.units import PassKey, pass_key

_ELEMENT_SIZE: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class ProfilePricing:
    """The ``profile`` pricer of one live model.

    Args:
        runtime: The model.
        book: What is known already; None for nothing.
    """

    grows_with_features = False
    tells_recompute = False

    def __init__(self, runtime: Runtime, book: ProfileBook | None = None) -> None:
        self._runtime = runtime
        self._model = profile_model(runtime.facts)
        self._book = ProfileBook() if book is None else book
        self._seen: list[tuple[MemorySignature, ForwardShape, Observation]] = []
        self._changed = False

    def check_caller(self, bytes_per_token: int, *, source: str) -> None:
        if bytes_per_token > LOGICAL_CHARGE:
            raise ConfigError(
                f"{source} must not exceed {LOGICAL_CHARGE} bytes per logical token with pricing='profile', got "
                f"{bytes_per_token}: head and caller together are charged that much and no more. Use "
                "pricing='envelope', which charges what is declared, or a lighter loss"
            )

    def caller_allowance(self, declared: int) -> CallerAllowance:
        return CallerAllowance(
            bytes_per_token=LOGICAL_CHARGE,
            rule="pricing='profile' charges, for the head and the caller together,",
            next_step="Use pricing='envelope' and declare it, or a lighter loss",
        )

    @property
    def book(self) -> ProfileBook:
        """What counts in prices now."""
        return self._book

    def price(self, forwards: Sequence[Forward]) -> Price:
        prices = []
        for forward in forwards:
            signature, shape = self._read(forward)
            prices.append(price_forward(self._model, shape, self._book.find(signature)))
        return combine(prices, left_bytes=self._left_bytes(forwards))

    def at_least(self, forwards: Sequence[Sequence[Request]]) -> LowerBound | None:
        required, retained = [], []
        for requests in forwards:
            signature, shape = self._read_shared(requests)
            known = self._book.find(signature)
            required.append(required_at_least(self._model, shape, known).num_bytes)
            retained.append(retained_at_least(self._model, shape, known).num_bytes)
        # While one forward runs, the others are alive.
        kept = sum(retained)
        return LowerBound(max(kept - own + peak for own, peak in zip(retained, required, strict=True)))

    def begin(self) -> None:
        for signature, shape, observation in self._seen:
            self._book.observe(
                signature, shape, peak_bytes=observation.peak_bytes, live_bytes=observation.retained_bytes
            )
        self._changed = self._changed or bool(self._seen)
        self._seen = []

    def observe(self, forwards: Sequence[Forward], observation: Observation) -> None:
        """Keep one forward's observation for the next call; of several together no one's share is known."""
        if len(forwards) == 1:
            self._seen.append((*self._read(forwards[0]), observation))

    def learned(self) -> dict[str, Any]:
        self.begin()
        return {"name": "profile", "profiles": self._book.to_json()}

    def load_learned(self, values: Mapping[str, Any]) -> None:
        if values["name"] == "profile":
            self._seen = []
            self._book = ProfileBook.from_json(values["profiles"])

    def load_stored(self, values: Mapping[str, Any]) -> None:
        rows = [{"signature": json.loads(signature), "profile": one} for signature, one in values.items()]
        self._book = ProfileBook.from_json(rows)

    def news(self) -> dict[str, Any]:
        rows = self._book.to_json() if self._changed else []
        self._changed = False
        return {json.dumps(row["signature"], sort_keys=True): row["profile"] for row in rows}

    def facts(self, forwards: Sequence[Forward]) -> dict[str, Any]:
        found = []
        for forward in forwards:
            signature, shape = self._read(forward)
            known = self._book.find(signature)
            found.append(
                {
                    "signature": signature.to_json(),
                    "short_requests": signature.short_requests,
                    "one_layer_recompute": self._runtime.recompute_reading.one_layer,
                    "packed_priced": shape.packed,
                    "packed_rows": shape.packed_rows,
                    "logical_tokens": shape.logical_tokens,
                    "output_bytes": shape.output_bytes,
                    "segments": shape.segments,
                    "profile": None if known is None else known.to_json(),
                }
            )
        return {
            "name": "profile",
            "model": asdict(self._model),
            "left_bytes": self._left_bytes(forwards),
            "forwards": found,
        }

    def _left_bytes(self, forwards: Sequence[Forward]) -> int:
        # Gradients within one forward are in what was learned of it.
        return left_bytes(forwards, self._runtime.facts) if len(forwards) > 1 else 0

    def _read(self, forward: Forward) -> tuple[MemorySignature, ForwardShape]:
        """Return what a forward is, and how it is priced, by the live model as it is now."""
        works = forward.works
        return self._shape(
            forward.requests,
            packed_rows=sum(work.batch.packed_rows for work in works),
            segments=sum(work.batch.num_segments for work in works if not work.no_grad),
        )

    def _read_shared(self, requests: Sequence[Request]) -> tuple[MemorySignature, ForwardShape]:
        """Return the same for requests under full sharing, their segments left out; packs nothing."""
        by_key: dict[PassKey, list[Request]] = {}
        for request in requests:
            if request.computes:
                by_key.setdefault(pass_key(request, self._runtime.facts), []).append(request)
        trees = [build_tree([request.tokens for request in members]) for members in by_key.values()]
        return self._shape(
            requests, packed_rows=sum(layout_rows(tree, Layout.full_sharing()) for tree in trees), segments=0
        )

    def _shape(
        self, requests: Sequence[Request], *, packed_rows: int, segments: int
    ) -> tuple[MemorySignature, ForwardShape]:
        reading, facts = self._runtime.recompute_reading, self._runtime.facts
        signature = MemorySignature.of(
            ((_key(request), request.num_tokens) for request in requests),
            grad_modes=(not request.no_grad for request in requests),
            adapters=(pass_key(request, facts)[1] for request in requests),
            recompute=reading.name,
        )
        shape = ForwardShape(
            packed_rows=packed_rows,
            logical_tokens=sum(request.num_tokens for request in requests if request.computes),
            output_bytes=sum(_output_bytes(self._model, request) for request in requests),
            segments=segments,
            packed=packed_priced(signature, reading.one_layer),
        )
        return signature, shape


def profile_model(facts: ModelFacts) -> ProfileModel:
    """Return what the pricer knows of a model. Families with experts or recurrent states are not run yet."""
    return ProfileModel(
        num_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        vocabulary_size=facts.vocabulary_size,
        element_size=_ELEMENT_SIZE[facts.dtype],
    )


def open_pricing(pricing: Pricing, runtime: Runtime, envelope: EnvelopePricer) -> Pricer:
    """Return the pricer of a rank by its name.

    Raises:
        ConfigError: There is no such pricer, or it does not support the caller's declared loss.
    """
    if pricing == "envelope":

        def price(work: PassWork) -> Price:
            return with_scalars(envelope.price(work), runtime, work)

        return ResidualPricing(price, runtime.facts, lambda: envelope.surroundings)
    if pricing != "profile":
        raise ConfigError(f"pricing must be 'envelope' or 'profile', got {pricing!r}")
    found = ProfilePricing(runtime)
    found.check_caller(envelope.caller_bytes_per_token, source="caller_bytes_per_token")
    return found


def _key(request: Request) -> str:
    return request_key(
        None if request.labels is None else request.labels.shape,
        top_k=request.top_k,
        logits=request.logits,
        hidden_states=request.hidden_states,
    )


def _output_bytes(model: ProfileModel, request: Request) -> int:
    rows = int(request.positions.size)
    return model.output_bytes(
        labels=0 if request.labels is None else request.labels.size,
        top_k_entries=rows * (request.top_k or 0),
        logits_rows=rows * request.logits,
        hidden_states_rows=rows * request.hidden_states,
    )
