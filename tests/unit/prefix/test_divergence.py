"""Reports of near-identical prefixes."""

from __future__ import annotations

import numpy as np
import pytest

from trainer_rank.prefix import Divergence, build_tree, first_divergences

BASE = np.arange(1000, 1400, dtype=np.int64)


def changed(row: np.ndarray, at: int) -> np.ndarray:
    copy = row.copy()
    copy[at] += 10**6
    return copy


def trajectory(turns: int) -> list[np.ndarray]:
    """Each turn extends the one before by 100 tokens, with the token at 60 % of the history changed."""
    rows = [BASE[:100].copy()]
    for turn in range(1, turns):
        history = changed(rows[-1], int(0.6 * rows[-1].size))
        rows.append(np.concatenate([history, 10_000 * turn + np.arange(100)]))
    return rows


def test_one_changed_token_is_reported_with_the_rows_it_costs() -> None:
    """Position, both tokens, and every equal token after it."""
    rows = [BASE, changed(BASE, 240)]
    assert first_divergences(build_tree(rows)) == (
        Divergence(
            request_a=0,
            request_b=1,
            position=240,
            token_a=1240,
            token_b=1_001_240,
            changed_a=1,
            changed_b=1,
            lost_rows=159,
        ),
    )


def test_every_turn_of_a_retokenised_trajectory_is_reported() -> None:
    """Eight turns with one changed token each part seven times, each time inside the shorter history."""
    found = first_divergences(build_tree(trajectory(8)))
    assert len(found) == 7
    assert {(report.changed_a, report.changed_b) for report in found} == {(1, 1)}
    assert {report.position for report in found} == {60 * 1 + 60 * turn for turn in range(7)}


def test_an_inserted_token_is_followed() -> None:
    """The rows need not stay aligned by position."""
    rows = [BASE, np.insert(BASE, 100, 5)]
    (report,) = first_divergences(build_tree(rows))
    assert (report.request_a, report.request_b) == (1, 0)
    assert (report.position, report.changed_a, report.changed_b, report.lost_rows) == (100, 1, 0, 300)


def test_plain_branches_are_not_reported() -> None:
    """Completions that never agree again are what sharing is for."""
    rows = [np.concatenate([BASE, 10_000 * branch + np.arange(200)]) for branch in range(1, 5)]
    assert first_divergences(build_tree(rows)) == ()


def test_extensions_and_duplicates_are_not_reported() -> None:
    """A row that stops does not part."""
    assert first_divergences(build_tree([BASE, BASE, BASE[:200]])) == ()


def test_a_short_common_prefix_is_not_reported() -> None:
    """Below the floor nothing counts as shared history."""
    rows = [BASE, changed(BASE, 10)]
    assert first_divergences(build_tree(rows)) == ()
    assert len(first_divergences(build_tree(rows), min_shared=10)) == 1


def test_a_change_longer_than_the_window_is_not_reported() -> None:
    """A rewritten passage is another text."""
    other = BASE.copy()
    other[100:109] += 10**6
    assert first_divergences(build_tree([BASE, other])) == ()
    assert len(first_divergences(build_tree([BASE, other]), max_changed=9)) == 1


def test_agreement_shorter_than_the_floor_is_not_reported() -> None:
    """A few equal tokens are chance."""
    assert first_divergences(build_tree([BASE, changed(BASE, 390)])) == ()


@pytest.mark.parametrize("arguments", [{"min_shared": -1}, {"max_changed": 0}, {"min_resumed": 0}])
def test_limits_out_of_range_are_errors(arguments: dict[str, int]) -> None:
    """The error names the rule."""
    with pytest.raises(ValueError, match="min_shared must be >= 0, max_changed and min_resumed >= 1"):
        first_divergences(build_tree([BASE]), **arguments)
