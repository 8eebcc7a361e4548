"""Command lines that work, shown at the end of each command's help."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

EXAMPLES: Final[Mapping[str, tuple[str, ...]]] = {
    "": (
        "trainer-rank init",
        "trainer-rank data check rollouts.jsonl --model models/smollm2-135m",
        "trainer-rank plan --config trainer-rank.yaml --device H200",
        "trainer-rank train trainer-rank.yaml",
    ),
    "train": (
        "trainer-rank train trainer-rank.yaml",
        "trainer-rank train trainer-rank.yaml --warm-up worst --json",
    ),
    "plan": (
        'trainer-rank plan --model Qwen3-8B --device H200 --shape "groups=2 g=8 prompt=8192 completion=512"',
        "trainer-rank plan --config trainer-rank.yaml --memory 24GiB --html plan.html",
    ),
    "data check": (
        "trainer-rank data check rollouts.jsonl",
        "trainer-rank data check chats.parquet --model models/smollm2-135m --train-on last --json",
    ),
    "profile ls": ("trainer-rank profile ls", "trainer-rank profile ls --json"),
    "profile show": ("trainer-rank profile show 3f2a",),
    "profile export": (
        "trainer-rank profile export h200.json",
        "trainer-rank profile export one.json --environment 3f2a",
    ),
    "profile import": ("trainer-rank profile import h200.json",),
    "profile fit-speed": (
        "trainer-rank profile fit-speed runs/001",
        "trainer-rank profile fit-speed trainer-rank.yaml",
    ),
    "profile forget": ("trainer-rank profile forget 3f2a",),
    "init": (
        "trainer-rank init",
        "trainer-rank init runs/first.yaml --force",
    ),
}


def epilog(command: str) -> str:
    """Return the end of a command's help; ``\\b`` keeps click from joining and wrapping the lines."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in EXAMPLES[command])])
