"""Which options each loss has, their defaults, and the data fields it needs. Imports no torch.

One table for the three who ask: the configuration, the reader of the data, and the losses themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

LOSSES: Final[Mapping[str, Mapping[str, Any]]] = {
    "sft": {},
    "cispo": {"epsilon_low": 1.0, "epsilon_high": 4.0},
    "grpo": {
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "kl_coefficient": 0.0,
        "advantages": "given",
        "reference": "given",
    },
    "ppo-clip": {"epsilon_low": 0.2, "epsilon_high": 0.2},
    "dpo": {"normalisation": "sequence-mean", "beta": 0.1, "reference": "given"},
    "custom": {"function": None},
}
"""The options of each loss with their defaults; the normalisation is listed where it differs from token-mean."""

OPTIONS: Final = tuple(dict.fromkeys(key for options in LOSSES.values() for key in options if key != "normalisation"))


def filled(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a loss section with the defaults of the loss they name filled in.

    Nothing is checked. The reference of ``grpo`` has a default only where a penalty looks at it.
    """
    name = entries.get("name", "sft")
    result = dict(entries)
    for key, default in (LOSSES.get(name, {}) if isinstance(name, str) else {}).items():
        if result.get(key) is None and not (key == "reference" and name == "grpo" and not _is_positive(entries)):
            result[key] = default
    return result


def owners(option: str) -> str:
    """Return the losses that have an option, as text: ``the losses 'cispo' and 'grpo'``."""
    names = [repr(name) for name, options in LOSSES.items() if option in options]
    return f"the loss {names[0]}" if len(names) == 1 else f"the losses {', '.join(names[:-1])} and {names[-1]}"


def needed_fields(
    name: str, *, kl_coefficient: float | None = None, advantages: str | None = None, reference: str | None = None
) -> frozenset[str]:
    """Return the data fields a loss needs on every line; ``advantage`` stands for itself or ``advantages``.

    Args:
        name: Of the loss.
        kl_coefficient, advantages, reference: As in the configuration; None takes the loss's default.
    """
    options = {
        **LOSSES[name],
        **{
            key: value
            for key, value in (
                ("kl_coefficient", kl_coefficient), ("advantages", advantages), ("reference", reference)
            )
            if value is not None
        },
    }  # fmt: skip
    needed = set()
    if name in ("cispo", "grpo", "ppo-clip"):
        needed |= {"old_logprobs", "reward" if options.get("advantages") == "group" else "advantage"}
    if name == "dpo":
        needed.add("chosen")
    if options.get("reference") == "given" and (name == "dpo" or options["kl_coefficient"] > 0):
        needed.add("ref_logprobs")
    return frozenset(needed)


def _is_positive(entries: Mapping[str, Any]) -> bool:
    """Return whether there is a penalty; what is not a number is refused elsewhere. YAML 1.1 reads 1e-3 as text."""
    try:
        return float(entries.get("kl_coefficient") or 0.0) > 0
    except (TypeError, ValueError):
        return False
