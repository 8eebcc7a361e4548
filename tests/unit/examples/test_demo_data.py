"""The demo's data: what a trajectory becomes, and the shape of what the installed wheel gives."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trainer_rank.training.chat import encode_conversation
from trainer_rank.training.messages import Where
from trainer_rank.training.rendering import Renderer
from trainer_rank.training.rollouts import Limits, read_rollouts

CHECKOUT = Path(__file__).parents[3]
MODEL = CHECKOUT / ".cache" / "smollm2-135m"


def _load(name: str) -> ModuleType:
    path = CHECKOUT / "examples" / "demo" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"demo_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


demo: Any = _load("prepare_data")

needs_wheel = pytest.mark.skipif(
    importlib.util.find_spec("bfcl_eval") is None, reason="the bfcl-eval wheel is not installed"
)
needs_model = pytest.mark.skipif(
    not (MODEL / "tokenizer.json").is_file(), reason="the demo's model is not prepared (make prepare)"
)


def spell(text: str) -> list[int]:
    """Encode a text as its characters."""
    return [ord(character) for character in text]


def trajectory() -> Any:
    """Return a trajectory of two turns and one tool."""
    return demo.Trajectory(
        name="t", tools=({"name": "cd"},), turns=(("go to a", ("cd('a')",)), ("and back", ("cd('..')", "cd('b')")))
    )


def trained_text(rollout: dict[str, Any]) -> str:
    """Return the characters a rollout is trained on."""
    pairs = zip(rollout["tokens"], rollout["trained"], strict=True)
    return "".join(chr(token) for token, trained in pairs if trained)


def test_one_request_per_turn_is_trained_on_that_turns_calls() -> None:
    """Earlier calls are context, the newest are learnt together with the end of the turn."""
    first, second = demo.rollouts(trajectory(), spell)
    assert trained_text(first) == "[cd('a')]<|im_end|>"
    assert trained_text(second) == "[cd('..'), cd('b')]<|im_end|>"


def test_each_request_is_a_prefix_of_the_next() -> None:
    """The whole trajectory packs into the rows of its last request."""
    first, second = demo.rollouts(trajectory(), spell)
    assert second["tokens"][: len(first["tokens"])] == first["tokens"]
    assert demo.count([[first, second]])["packed_rows"] == len(second["tokens"])


def test_a_call_that_is_no_call_is_refused() -> None:
    """Ground truth that does not parse as a call of a named tool stops the preparation."""
    with pytest.raises(SystemExit, match="not a call of a named tool"):
        demo._tool_name("1 + 1")


def test_too_few_suitable_trajectories_are_refused() -> None:
    """The message says how many there are."""
    with pytest.raises(SystemExit, match="only 0 trajectories"):
        demo.choose([demo.rollouts(trajectory(), spell)])


@needs_wheel
def test_the_wheel_holds_trajectories_whose_tools_are_exactly_those_called() -> None:
    """Every task with calls in every turn is read, with a document for each tool it calls and no other."""
    trajectories = demo.load_trajectories(demo.data_folder())
    assert len(trajectories) > 150
    for one in trajectories:
        called = {demo._tool_name(call) for _, calls in one.turns for call in calls}
        assert {tool["name"] for tool in one.tools} == called


@needs_wheel
@needs_model
def test_the_written_data_have_the_documented_shape(tmp_path: Path) -> None:
    """15 trajectories to train on and 3 others to evaluate on, readable as rollouts, sharing about 3.6-fold or more."""
    assert demo.main(["--model", str(MODEL), "--out", str(tmp_path)]) == 0
    limits = Limits(vocabulary_size=49_152, context_length=8_192)
    groups = {}
    for name, expected in (("train", 15), ("eval", 3)):
        rollouts = read_rollouts(tmp_path / f"{name}.jsonl", limits)
        groups[name] = {rollout.group for rollout in rollouts}
        assert len(groups[name]) == expected
        longest = {rollout.group: len(rollout.tokens) for rollout in rollouts}
        assert all(demo.MIN_ROWS <= rows <= demo.MAX_ROWS for rows in longest.values())
        assert sum(len(rollout.tokens) for rollout in rollouts) / sum(longest.values()) >= 3.5
        assert all(rollout.trained.any() for rollout in rollouts)
    assert not groups["train"] & groups["eval"]


@needs_wheel
@needs_model
def test_the_tokens_are_those_of_the_models_own_chat_template(tmp_path: Path) -> None:
    """Encoding message by message gives the ids of the whole conversation encoded at once by the template.

    Given as messages, the conversation has the same tokens, and the same ones are trained.
    """
    renderer = Renderer.load(str(MODEL))
    tokenizer = renderer.tokenizer
    one = demo.load_trajectories(demo.data_folder())[0]
    last = demo.rollouts(one, lambda text: tokenizer(text, add_special_tokens=False)["input_ids"])[-1]
    system = "\n".join([demo.INSTRUCTION, *(json.dumps(tool, separators=(",", ":")) for tool in one.tools)])
    messages = [{"role": "system", "content": system}]
    for user, calls in one.turns:
        messages.append({"role": "user", "content": user})
        messages.append({"role": "assistant", "content": f"[{', '.join(calls)}]"})
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == last["tokens"] + tokenizer("\n")["input_ids"]
    where = Where(path=tmp_path, line=1)
    tokens, trained = encode_conversation(renderer, where, messages, train_on="last")
    assert tokens[:-1].tolist() == last["tokens"]
    assert trained.tolist() == [*map(bool, last["trained"]), False]
