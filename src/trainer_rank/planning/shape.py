"""Requests by their lengths alone: ``groups=2 g=8 system=2048 prompt=8192 completion=512``. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np

from trainer_rank.errors import ConfigError
from trainer_rank.requests import Request

MOST_TOKENS: Final = 2**25
"""Of a shape: more than any step has, and little enough to hold their numbers in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Groups of completions, each group with a prompt of its own behind a system prompt that all share.

    Attributes:
        groups: Groups, at least 1.
        g: Completions per group, at least 1.
        system: Tokens all requests begin with.
        prompt: Further tokens that a group shares.
        completion: Trained tokens of each request, at least 1.
    """

    groups: int = 1
    g: int = 1
    system: int = 0
    prompt: int = 0
    completion: int = 1

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Return the shape a text of ``key=value`` words describes.

        Raises:
            ConfigError: A word is malformed, unknown or given twice, or a number breaks its rule.
        """
        known = [field.name for field in fields(cls)]
        found: dict[str, int] = {}
        for word in text.split():
            name, equals, value = word.partition("=")
            if not equals or name not in known:
                raise ConfigError(f"shape takes words key=number with the keys {', '.join(known)}, got {word!r}")
            if name in found:
                raise ConfigError(f"shape.{name} must be given once, got it again in {word!r}")
            least = 0 if name in ("system", "prompt") else 1
            # Longer numbers than any limit are not read at all.
            if not value.isascii() or not value.isdigit() or len(value) > 18 or int(value) < least:
                raise ConfigError(f"shape.{name} must be a whole number of at least {least}, got {value!r}")
            found[name] = int(value)
        if "completion" not in found:
            raise ConfigError(f"shape must say completion=<tokens>, got {text!r}")
        shape = cls(**found)
        if shape.logical_tokens > MOST_TOKENS:
            raise ConfigError(
                f"shape must have at most {MOST_TOKENS:,} tokens in all its requests, got {shape.logical_tokens:,}; "
                "describe one step"
            )
        return shape

    @property
    def logical_tokens(self) -> int:
        """Tokens of all requests."""
        return self.groups * self.g * (self.system + self.prompt + self.completion)

    @property
    def trained_tokens(self) -> int:
        """Of them, those that are learnt."""
        return self.groups * self.g * self.completion

    def shorter(self, longest: int) -> tuple[str, Callable[[int], list[Request]]] | None:
        """Return the change in words and the requests with completions cut to ``longest`` tokens in all."""
        fewer = longest - self.system - self.prompt
        if not 1 <= fewer < self.completion:
            return None
        return (
            f"completion: {self.completion:,} -> {fewer:,} tokens",
            replace(self, completion=fewer).requests,
        )

    def requests(self, vocabulary_size: int) -> list[Request]:
        """Return the requests, with random tokens that share what the shape says."""
        draw = np.random.default_rng(0)
        start = draw.integers(0, vocabulary_size, self.system)
        made = []
        for _ in range(self.groups):
            prompt = np.concatenate([start, draw.integers(0, vocabulary_size, self.prompt)])
            for _ in range(self.g):
                row = np.concatenate([prompt, draw.integers(0, vocabulary_size, self.completion)])
                made.append(Request.next_token(row, trained=np.arange(row.size) >= prompt.size))
        return made
