"""What may change in the configuration of a run that goes on. Imports no torch.

A change is *safe* when the steps from here on are those of the uninterrupted run, bit for bit; *inexact* when they are
the same steps up to rounding; and everything else is another run, which is refused unless it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from trainer_rank.training.config import TrainConfig

# Where model and data lie does not matter: that they are the same is checked by their content.
SAFE: Final = frozenset(
    {
        "model.path", "data.path", "data.eval_path", "eval_every", "checkpoint_every", "keep_checkpoints",
        "verify_every", "verify_requests", "tensorboard", "compare_one_by_one", "warm_up", "run_dir",
    }
)  # fmt: skip

INEXACT: Final = {
    "threads": "sums are taken in another order, so numbers differ in their last bits",
    "memory_budget": "steps that were not begun yet may be split elsewhere, so numbers differ in their last bits",
    "max_packed_tokens": "steps that were not begun yet may be split elsewhere, so numbers differ in their last bits",
    "pricing": "steps that were not begun yet may be split elsewhere, so numbers differ in their last bits",
    "learned": "steps that were not begun yet may be split elsewhere, so numbers differ in their last bits",
    "model.recompute": "steps that were not begun yet may be split elsewhere, so numbers differ in their last bits",
}

LENGTH: Final = ("steps", "epochs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One key whose value is not the recorded one.

    Attributes:
        key: Dotted.
        before, after: The two values.
        caution: Why the numbers may differ in their last bits, for an inexact change.
        fault: Why it is another run, for one that is refused; both are empty for a safe one.
    """

    key: str
    before: object
    after: object
    caution: str = ""
    fault: str = ""

    def __str__(self) -> str:
        reason = self.fault or self.caution
        return f"{self.key} {self.before!r} -> {self.after!r}" + (f" ({reason})" if reason else "")


def changes(recorded: Mapping[str, Any], config: TrainConfig) -> list[Change]:
    """Return what differs between a recorded configuration, as ``model_dump(mode="json")`` gave it, and ``config``.

    A key that the recorded one does not have yet counts with its default.
    """
    smallest = TrainConfig.model_validate({"model": {"path": "-"}, "data": {"path": "-"}, "steps": 1})
    defaults = {**_flat(smallest.model_dump(mode="json")), "steps": None}
    before, after = {**defaults, **_flat(recorded)}, _flat(config.model_dump(mode="json"))
    return [
        _judged(key, before.get(key), after.get(key), config)
        for key in {**after, **before}
        if before.get(key) != after.get(key)
    ]


def _judged(key: str, before: Any, after: Any, config: TrainConfig) -> Change:
    if key in SAFE:
        return Change(key=key, before=before, after=after)
    if key in INEXACT:
        return Change(key=key, before=before, after=after, caution=INEXACT[key])
    fault = "the steps to come are those of another run"
    if key in LENGTH:
        if before is None or after is None:
            fault = "steps and epochs cut the data differently, so extend the one the run began with"
        elif config.optimizer.schedule == "constant":
            return Change(key=key, before=before, after=after)
        else:
            fault = f"the schedule {config.optimizer.schedule!r} spans the whole run, so every learning rate changes"
    return Change(key=key, before=before, after=after, fault=fault)


def _flat(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return sections as dotted keys; what is deeper, the adapter, stays one value."""
    flat: dict[str, Any] = {}
    for key, value in entries.items():
        flat |= {f"{key}.{name}": one for name, one in value.items()} if isinstance(value, dict) else {key: value}
    return flat
