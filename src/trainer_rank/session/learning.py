"""Between a rank's pricer and the store that outlives the process: what is known goes in, what is learned comes out."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from importlib import metadata
from typing import Any, Final

import torch

from trainer_rank.errors import StoreError
from trainer_rank.executor.envelope_store import code_digest
from trainer_rank.meters import Meter
from trainer_rank.planner import Speed
from trainer_rank.runtime import Runtime
from trainer_rank.session.pricing import Pricer, Pricing
from trainer_rank.store import SPEED, LearnedStore

_LIBRARIES: Final = ("torch", "transformers", "peft")


class Learning:
    """What one rank learns.

    Without a store it lasts as long as the rank, or as its checkpoints. A store that cannot be used is told once, and
    the rank goes on without it: nothing that is admitted depends on it being there.

    Args:
        pricer: Learns.
        name: Its name.
        store: What was learned before; None for none.
        environment: What must agree for that to be of use.
        speed: How long passes are predicted to take; None takes what the store has.

    Attributes:
        speed: As given, as measured in this environment, or the convention.
    """

    def __init__(
        self,
        pricer: Pricer,
        name: Pricing,
        store: LearnedStore | None,
        environment: dict[str, Any],
        speed: Speed | None = None,
    ) -> None:
        self._pricer = pricer
        self._name = name
        self._store = store
        self._environment = environment
        self.speed = Speed() if speed is None else speed
        if store is not None:
            try:
                pricer.load_stored(store.load(environment, name))
                measured = store.load(environment, SPEED)
                if speed is None and measured:
                    self.speed = Speed.from_json(measured[""])
            except StoreError as error:
                self._give_up(error)

    def begin(self) -> None:
        """A call begins: what was observed before it counts now, and is written."""
        self._pricer.begin()
        news = self._pricer.news()
        if self._store is not None and news:
            try:
                self._store.merge(self._environment, self._name, news)
            except StoreError as error:
                self._give_up(error)

    def state(self) -> dict[str, Any]:
        """Return everything learned as plain values, with the environment it was learned in."""
        self.begin()
        return {**self._pricer.learned(), "speed": self.speed.to_json(), "environment": self._environment}

    def load(self, values: Mapping[str, Any]) -> None:
        """Go on from ``state``; of another environment only the speed, so that plans stay what they were."""
        if "speed" in values:
            self.speed = Speed.from_json(values["speed"])
        if values.get("environment", self._environment) == self._environment:
            self._pricer.load_learned(values)

    def _give_up(self, error: StoreError) -> None:
        self._store = None
        warnings.warn(f"what is learned stays in this process: {error}", RuntimeWarning, stacklevel=2)


def environment_of(runtime: Runtime, meter: Meter) -> dict[str, Any]:
    """Return what must agree for observed peaks to be compared: the model, the device, how it is measured, versions."""
    facts, device = runtime.facts, runtime.device
    text = json.dumps(dict(runtime.signature), sort_keys=True, default=str)
    return {
        "model": {
            "family": facts.family,
            "layers": facts.num_layers,
            "hidden_size": facts.hidden_size,
            "vocabulary": facts.vocabulary_size,
            "dtype": facts.dtype,
            "adapters": list(facts.adapters),
            "digest": hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
        },
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "meter": meter.name,
        "versions": {name: metadata.version(name) for name in _LIBRARIES}
        # A price is traced through this code: the difference to it is not that to another version's.
        | {"cuda": torch.version.cuda, "prices": code_digest()},
    }
