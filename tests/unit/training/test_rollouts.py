"""Rollout files: what is read, and what every refusal says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_rank.errors import DataError
from trainer_rank.training.loss_options import needed_fields
from trainer_rank.training.rollouts import FIELDS, Limits, Rollout, read_rollouts

GOOD: dict[str, Any] = {"tokens": [1, 2, 3], "trained": [0, 1, 1]}
SAMPLED: dict[str, Any] = {**GOOD, "advantage": -0.5, "old_logprobs": [None, -1.0, -2.0]}


def read(folder: Path, *lines: str | dict[str, Any], limits: Limits | None = None, end: str = "\n") -> list[Rollout]:
    """Write the lines to a file and read it."""
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path = folder / "data.jsonl"
    path.write_text("\n".join(text) + end, encoding="utf-8")
    return read_rollouts(path, limits)


def refusal(folder: Path, *lines: str | dict[str, Any], limits: Limits | None = None, end: str = "\n") -> DataError:
    """Return the error that reading the lines raises."""
    with pytest.raises(DataError) as caught:
        read(folder, *lines, limits=limits, end=end)
    return caught.value


def test_a_line_becomes_a_rollout(tmp_path: Path) -> None:
    """Every field arrives with its documented type and alignment."""
    (rollout,) = read(tmp_path, {**SAMPLED, "group": "a", "weight": 2})
    assert rollout.tokens.tolist() == [1, 2, 3]
    assert rollout.trained.tolist() == [False, True, True]
    assert (rollout.group, rollout.weight, rollout.advantage, rollout.line) == ("a", 2.0, -0.5, 1)
    assert rollout.old_logprobs is not None
    assert rollout.old_logprobs.tolist() == [0.0, -1.0, -2.0]


def test_optional_fields_may_be_absent(tmp_path: Path) -> None:
    """Tokens and a mask are enough for sft."""
    (rollout,) = read(tmp_path, GOOD)
    assert (rollout.group, rollout.weight, rollout.advantage, rollout.old_logprobs) == (None, 1.0, None, None)


def test_blank_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    """Line numbers are those of the file."""
    assert [rollout.line for rollout in read(tmp_path, "", GOOD, "  ", GOOD)] == [2, 4]


def test_a_missing_final_line_break_is_fine_when_the_line_is_whole(tmp_path: Path) -> None:
    """Only a line that does not parse is called half-written."""
    assert len(read(tmp_path, GOOD, end="")) == 1


@given(cut=st.integers(min_value=1, max_value=len(json.dumps(SAMPLED)) - 1))
def test_a_line_cut_anywhere_is_refused_with_its_line_and_column(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    """A writer that died half-way is recognised wherever it died."""
    error = refusal(tmp_path_factory.mktemp("cut"), GOOD, json.dumps(SAMPLED)[:cut], end="")
    assert error.line == 2
    assert error.column is not None
    assert 1 <= error.column <= cut + 1
    assert "half-written" in str(error)


def test_invalid_json_in_the_middle_names_file_line_and_column(tmp_path: Path) -> None:
    """The message opens with file:line:column."""
    error = refusal(tmp_path, GOOD, '{"tokens": [1, }', GOOD)
    assert str(error).startswith(f"{tmp_path / 'data.jsonl'}:2:16: is not valid JSON")
    assert (error.path, error.line, error.column) == (tmp_path / "data.jsonl", 2, 16)


def test_bytes_that_are_not_text_name_line_and_column(tmp_path: Path) -> None:
    """A line that is not UTF-8 is refused, the column counted in characters."""
    path = tmp_path / "data.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"group": "\xc3\xa9\xff"}\n')
    with pytest.raises(DataError, match="is not UTF-8") as caught:
        read_rollouts(path)
    assert (caught.value.line, caught.value.column) == (2, 13)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """The path and the reason are named."""
    with pytest.raises(DataError, match=r"none\.jsonl: cannot be read \(No such file"):
        read_rollouts(tmp_path / "none.jsonl")


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    """Training on nothing is a mistake in the data, not an empty run."""
    assert "holds no request" in str(refusal(tmp_path, "", ""))


@pytest.mark.parametrize("line", ["[1, 2]", "3", "null", '"tokens"'])
def test_a_line_that_is_no_object_is_refused(tmp_path: Path, line: str) -> None:
    """Valid JSON of another kind is not a rollout."""
    assert "a line must be a JSON object" in str(refusal(tmp_path, line))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": []}, "tokens: must hold at least one token"),
        ({"tokens": "123"}, "tokens: must be a list with one entry per token, got '123' of type str"),
        ({"tokens": [1, 2.0, 3]}, "tokens[1]: must be an integer token id, got 2.0 of type float"),
        ({"tokens": [1, True, 3]}, "tokens[1]: must be an integer token id, got True of type bool"),
        ({"tokens": [1, -1, 3]}, "tokens[1]: must be between 0 and"),
        ({"tokens": [1, 10**30, 3]}, "tokens[1]: must be between 0 and"),
        ({"trained": [0, 1]}, "trained: must have one entry per token, got 2 entries for 3 tokens"),
        ({"trained": [0, 2, 1]}, "trained[1]: must be 0 or 1, got 2"),
        ({"trained": [0, 1.0, 1]}, "trained[1]: must be 0 or 1, got 1.0"),
        ({"trained": None}, "trained: must be a list with one entry per token"),
        ({"group": 7}, "group: must be a string or null, got 7"),
        ({"weight": float("nan")}, "weight: must be finite, got nan"),
        ({"weight": float("inf")}, "weight: must be finite, got inf"),
        ({"weight": 10**400}, "weight: must be finite, got inf"),
        ({"weight": -1}, "weight: must not be negative, got -1.0"),
        ({"weight": "1"}, "weight: must be a number, got '1' of type str"),
        ({"weight": None}, "weight: must be a number"),
        ({"advantage": float("-inf")}, "advantage: must be finite, got -inf"),
        ({"old_logprobs": [0, -1]}, "old_logprobs: must have one entry per token, got 2 entries for 3 tokens"),
        ({"old_logprobs": [None, None, -1]}, "old_logprobs[1]: must be a number where trained is 1, got null"),
        ({"old_logprobs": [None, 0.5, -1]}, "old_logprobs[1]: must be a log-probability, at most 0, got 0.5"),
        ({"old_logprobs": [None, float("nan"), -1]}, "old_logprobs[1]: must be finite, got nan"),
        ({"tokns": [1]}, "unknown field 'tokns'; did you mean 'tokens'?"),
        ({"zzzz": 1}, "unknown field 'zzzz'; the fields are tokens, trained"),
    ],
)
def test_a_broken_rule_names_line_field_rule_and_value(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """Every refusal says which line and field, what must hold and what was given."""
    error = refusal(tmp_path, GOOD, {**GOOD, **change})
    assert message in str(error)
    assert error.line == 2


@pytest.mark.parametrize("field", ["tokens", "trained"])
def test_a_missing_required_field_is_refused(tmp_path: Path, field: str) -> None:
    """Tokens and mask are required."""
    line = {name: value for name, value in GOOD.items() if name != field}
    assert f"{field}: is required" in str(refusal(tmp_path, line))


def test_a_field_given_twice_is_refused(tmp_path: Path) -> None:
    """JSON readers keep the last of two equal names silently; here it is an error."""
    assert "weight: is given twice" in str(
        refusal(tmp_path, '{"tokens": [1], "trained": [0], "weight": 1, "weight": 2}')
    )


def test_a_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    """The message says position, value and vocabulary size."""
    error = refusal(tmp_path, {"tokens": [1, 100], "trained": [0, 1]}, limits=Limits(vocabulary_size=100))
    assert "tokens[1]: must be between 0 and 99, the model's vocabulary of 100, got 100" in str(error)


def test_a_request_longer_than_the_context_is_refused_not_truncated(tmp_path: Path) -> None:
    """The message says length and limit."""
    error = refusal(tmp_path, GOOD, limits=Limits(context_length=2))
    assert "tokens: has 3 tokens, and the model's context is 2" in str(error)
    assert len(read(tmp_path, GOOD, limits=Limits(context_length=3))) == 1


@pytest.mark.parametrize("field", ["advantage", "old_logprobs"])
def test_cispo_requires_what_it_weighs_with(tmp_path: Path, field: str) -> None:
    """The same line is fine for sft."""
    line = {name: value for name, value in SAMPLED.items() if name != field}
    assert f"{field}: is required by the loss 'cispo'" in str(refusal(tmp_path, line, limits=Limits(loss="cispo")))
    assert len(read(tmp_path, line)) == 1


def test_old_logprobs_of_the_first_token_may_be_null_even_if_trained(tmp_path: Path) -> None:
    """Nothing predicts token 0, so it needs no old log-probability."""
    line = {**SAMPLED, "trained": [1, 1, 1]}
    assert len(read(tmp_path, line, limits=Limits(loss="cispo"))) == 1


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    """A line that would exhaust the parser's stack is an error of the data."""
    assert refusal(tmp_path, "[" * 200_000).line == 1


@given(
    tokens=st.lists(st.integers(0, 99), min_size=1, max_size=20),
    data=st.data(),
)
def test_what_is_written_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[int], data: st.DataObject
) -> None:
    """A valid line round-trips exactly."""
    size = len(tokens)
    trained = data.draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
    weight = data.draw(st.floats(0, 1e6))
    line = {"tokens": tokens, "trained": trained, "weight": weight}
    (rollout,) = read(tmp_path_factory.mktemp("round"), line, limits=Limits(vocabulary_size=100, context_length=20))
    assert (rollout.tokens.tolist(), rollout.trained.astype(int).tolist(), rollout.weight) == (tokens, trained, weight)


def test_fields_are_pinned() -> None:
    """The file format is public."""
    assert FIELDS == (
        "tokens", "trained", "group", "weight", "advantage", "old_logprobs",
        "reward", "advantages", "ref_logprobs", "chosen", "pair",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": "1"}, "reward: must be a number, got '1' of type str"),
        ({"reward": float("nan")}, "reward: must be finite, got nan"),
        ({"advantages": [0.5, 1.0]}, "advantages: must have one entry per token, got 2 entries for 3 tokens"),
        ({"advantages": [None, None, 1.0]}, "advantages[1]: must be a number where trained is 1, got null"),
        ({"advantages": [0, 1e300, 0]}, "advantages[1]: must fit into a float32, got 1e+300"),
        ({"advantages": [0, 1, 1], "advantage": 1}, "advantages: stands beside advantage; keep one"),
        ({"ref_logprobs": 3}, "ref_logprobs: must be a list with one entry per token, got 3"),
        ({"ref_logprobs": [None, 0.5, -1]}, "ref_logprobs[1]: must be a log-probability, at most 0, got 0.5"),
        ({"chosen": 1}, "chosen: must be true or false, got 1 of type int"),
        ({"pair": 7}, "pair: must be a string or null, got 7 of type int"),
    ],
)
def test_a_field_of_a_loss_that_breaks_its_rule_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    """Field, rule and value are named."""
    assert message in str(refusal(tmp_path, {**GOOD, **change}))


@pytest.mark.parametrize(
    ("loss", "given", "missing"),
    [
        ("grpo", {"old_logprobs": [0, -1, -1]}, "advantage"),
        ("grpo", {"advantage": 1}, "old_logprobs"),
        ("ppo-clip", {"advantages": [0, 1, 1]}, "old_logprobs"),
        ("dpo", {"pair": "p", "chosen": True}, "ref_logprobs"),
        ("dpo", {"pair": "p", "ref_logprobs": [0, -1, -1]}, "chosen"),
    ],
)
def test_what_a_loss_needs_is_demanded(tmp_path: Path, loss: str, given: dict[str, Any], missing: str) -> None:
    """Before anything is loaded, by field and loss."""
    error = refusal(tmp_path, {**GOOD, **given}, limits=Limits(loss=loss))
    assert f"{missing}: is required by the loss '{loss}'; add it" in str(error)


def test_an_advantage_per_token_will_do(tmp_path: Path) -> None:
    """One number per request or one per token: either is an advantage."""
    line = {**GOOD, "advantages": [None, 1, -2], "old_logprobs": [None, -1, -1]}
    (rollout,) = read(tmp_path, line, limits=Limits(loss="ppo-clip"))
    assert rollout.advantages is not None
    assert rollout.advantages.tolist() == [0.0, 1.0, -2.0]


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        ({"name": "sft"}, set()),
        ({"name": "cispo"}, {"advantage", "old_logprobs"}),
        ({"name": "grpo", "advantages": "group"}, {"reward", "old_logprobs"}),
        ({"name": "grpo", "kl_coefficient": 0.1}, {"advantage", "old_logprobs", "ref_logprobs"}),
        ({"name": "grpo", "kl_coefficient": 0.1, "reference": "adapter-off"}, {"advantage", "old_logprobs"}),
        ({"name": "dpo"}, {"chosen", "ref_logprobs"}),
        ({"name": "dpo", "reference": "adapter-off"}, {"chosen"}),
        ({"name": "custom"}, set()),
    ],
)
def test_needs_follow_the_options(options: dict[str, Any], needs: set[str]) -> None:
    """A reward replaces the advantage, and an adapter that is turned off the reference's log-probs."""
    assert needed_fields(**options) == needs
