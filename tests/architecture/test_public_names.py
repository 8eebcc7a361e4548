"""What users may rely on is written down here; a change to it is a decision, not an accident."""

from __future__ import annotations

import importlib
import inspect

import pytest

import trainer_rank

PUBLIC = [
    "BASE",
    "AtomicGroup",
    "BackwardError",
    "ConfigError",
    "DataError",
    "Layout",
    "LoraConfig",
    "MeterError",
    "MicroBatch",
    "Request",
    "RequestError",
    "Result",
    "SelfTestError",
    "TopK",
    "TrainerRank",
    "TrainerRankError",
    "TrainerRankMemoryError",
    "TransformersRuntime",
    "UnsupportedModelError",
    "restore",
]
PACKAGES = ["executor", "memory", "meters", "planner", "prefix", "report", "requests", "runtime", "session"]


def test_the_public_names_are_these() -> None:
    """Nothing more, nothing less, in order."""
    assert trainer_rank.__all__ == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    """Also those that are loaded on first use; each says what it is."""
    assert inspect.getdoc(getattr(trainer_rank, name))


def test_another_name_is_an_attribute_error() -> None:
    """Lazy loading does not make up names."""
    with pytest.raises(AttributeError, match="'Trainer'"):
        _ = trainer_rank.Trainer


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_keeps_its_own_promise(package: str) -> None:
    """Each name in a package's ``__all__`` exists, in sorted order and once."""
    module = importlib.import_module(f"trainer_rank.{package}")
    names = getattr(module, "__all__", [])
    assert all(hasattr(module, name) for name in names)
    assert sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name)) == list(names)
    assert len(set(names)) == len(names)


def test_the_signature_of_the_main_entry_is_pinned() -> None:
    """Positional runtime, everything else by name."""
    parameters = inspect.signature(trainer_rank.TrainerRank).parameters
    assert list(parameters) == [
        "runtime", "memory_budget", "head_chunk_rows", "max_packed_tokens", "caller_bytes_per_token", "layout",
        "pricing", "store", "speed", "on_decision", "verify_backend", "meter",
    ]  # fmt: skip
    assert all(one.kind is one.KEYWORD_ONLY for name, one in parameters.items() if name != "runtime")
