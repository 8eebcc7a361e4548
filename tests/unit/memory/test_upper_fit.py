"""The upper fit, and which observations it rests on, against functions drawn at random."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_rank.memory.upper_fit import upper_fit


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 10**6), st.integers(1, 25))
def test_a_function_that_covers_the_essential_observations_covers_all(seed: int, count: int) -> None:
    """Every one is drawn at random and lifted until it touches an essential one."""
    draw = np.random.default_rng(seed)
    rows, tokens = draw.integers(1, 1000, count).astype(float), draw.integers(1, 5000, count).astype(float)
    missing = draw.integers(-100, 10**6, count).astype(float)
    found = upper_fit(rows, tokens, missing)
    sizes = np.column_stack([np.ones(count), rows, tokens])
    short = np.maximum(0, missing)
    assert (sizes @ found.coefficients >= short - 1e-9 * (1 + short.max())).all()
    if not short.any():
        assert not found.essential.any()
        return
    for _ in range(50):
        function = draw.random(3) ** 4 * short.max() / [1, rows.max(), tokens.max()]
        lift = (short[found.essential] / (sizes @ function)[found.essential]).max()
        assert (lift * (sizes @ function) >= short * (1 - 1e-6)).all()


def test_what_follows_from_others_is_not_essential() -> None:
    """A smaller pass that was short of more, two between which it lies, and a price that was enough."""
    rows = np.array([10.0, 20.0, 30.0, 25.0, 40.0])
    missing = np.array([400.0, 90.0, 1000.0, 500.0, -50.0])
    assert upper_fit(rows, rows, missing).essential.tolist() == [True, False, True, False, False]
