"""A price by the ``profile`` pricer made again from the record of a decision, without the model it was made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from trainer_rank.errors import ReplayError
from trainer_rank.memory import ForwardShape, MemorySignature, Price, Profile, ProfileModel, combine, packed_priced
from trainer_rank.memory.profile import price_forward


def replay_profile(pricing: Mapping[str, Any]) -> Price:
    """Return the price of the forwards of a recorded decision.

    Args:
        pricing: ``AdmissionRecord.pricing`` of the ``profile`` pricer, as it was or back from JSON. Entries that are
            not known are passed over.

    Raises:
        ReplayError: An entry is missing that the price depends on; nothing is guessed for it.
    """
    where = "pricing"
    model = _entry(pricing, "model", where)
    names = [field.name for field in fields(ProfileModel)]
    known = ProfileModel(**{name: _entry(model, name, f"{where}.model") for name in names})
    prices = [
        _forward(known, one, f"{where}.forwards[{number}]")
        for number, one in enumerate(_entry(pricing, "forwards", where))
    ]
    return combine(prices, left_bytes=_entry(pricing, "left_bytes", where))


def _forward(model: ProfileModel, entry: Mapping[str, Any], where: str) -> Price:
    signature = replace(
        MemorySignature.from_json(_entry(entry, "signature", where)),
        short_requests=_entry(entry, "short_requests", where),
    )
    shape = ForwardShape(
        packed_rows=_entry(entry, "packed_rows", where),
        logical_tokens=_entry(entry, "logical_tokens", where),
        output_bytes=_entry(entry, "output_bytes", where),
        segments=_entry(entry, "segments", where),
        packed=packed_priced(signature, _entry(entry, "one_layer_recompute", where)),
    )
    learned = _entry(entry, "profile", where)
    return price_forward(model, shape, None if learned is None else Profile.from_json(learned))


def _entry(values: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in values:
        raise ReplayError(
            f"incomplete: {where}.{name} is not recorded, and a price depends on it; record the run again with this "
            "version"
        )
    return values[name]
