"""Requests by their lengths alone."""

from __future__ import annotations

import pytest

from trainer_rank.errors import ConfigError
from trainer_rank.planning.shape import Shape
from trainer_rank.prefix import build_tree, pack
from trainer_rank.prefix.layout import Layout


def test_a_shape_makes_requests_that_share_what_it_says() -> None:
    """One system prompt, a prompt per group, completions that are trained."""
    shape = Shape.parse("groups=2 g=3 system=10 prompt=20 completion=5")
    requests = shape.requests(1000)
    packed = pack(build_tree([one.tokens for one in requests]), Layout.full_sharing())
    assert (len(requests), packed.logical_tokens, packed.packed_rows) == (6, 6 * 35, 10 + 2 * 20 + 6 * 5)
    assert all(one.num_trained == 5 for one in requests)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("g=2 completion=0", r"shape\.completion must be a whole number of at least 1, got '0'"),
        ("g=-1 completion=4", r"shape\.g must be a whole number of at least 1, got '-1'"),
        ("prompt=nan completion=4", r"shape\.prompt must be a whole number of at least 0, got 'nan'"),
        ("prompts=3 completion=4", r"keys groups, g, system, prompt, completion, got 'prompts=3'"),
        ("completion", r"got 'completion'"),
        ("g=1 g=2 completion=4", r"shape\.g must be given once"),
        ("g=4", r"must say completion="),
    ],
)
def test_a_malformed_shape_is_refused_by_key_rule_and_value(text: str, message: str) -> None:
    """Nothing is guessed from a typo."""
    with pytest.raises(ConfigError, match=message):
        Shape.parse(text)
