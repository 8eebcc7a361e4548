"""Build the demo's rollouts: real multi-turn tool-use trajectories from the ``bfcl-eval`` wheel, as JSON lines.

A trajectory is one task of the Berkeley Function Calling Leaderboard (multi-turn, base): a system prompt with the JSON
documents of the tools the task really calls, the user's turns, and the ground-truth calls as the assistant's turns.
It becomes one request per turn, and the loss is on that turn's calls and its ``<|im_end|>``:

    request 0   system  user 0  CALLS 0
    request 1   system  user 0  calls 0  user 1  CALLS 1             capitals: trained
    request 2   system  user 0  calls 0  user 1  calls 1  user 2  CALLS 2

The wheel's files are read as data; its package is not imported.

    python examples/demo/prepare_data.py [--model .cache/smollm2-135m] [--out .cache/demo]
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

CHECKOUT: Final = Path(__file__).resolve().parents[2]
SPLIT: Final = "BFCL_v4_multi_turn_base.json"

# 15 trajectories in five steps of three, and three that are never trained on. The window of sizes keeps the whole
# demo under three minutes on two cores (about 200 packed rows a second, forward and backward).
NUM_TRAIN: Final = 15
NUM_EVAL: Final = 3
MIN_TURNS: Final = 4
MIN_ROWS: Final = 500
MAX_ROWS: Final = 900

# What a caller of a tool needs; the schema of its answer is left out.
TOOL_KEYS: Final = ("name", "description", "parameters")

INSTRUCTION: Final = (
    "You call tools. Answer every turn with only the calls it needs, in order, as a list: "
    "[name(argument=value), name(argument=value)]. The tools are, one JSON document per line:"
)

Encode = Callable[[str], list[int]]
Rollout = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One task: ``tools`` are its tool documents, ``turns`` pairs of (what the user says, the calls that answer it)."""

    name: str
    tools: tuple[dict[str, Any], ...]
    turns: tuple[tuple[str, tuple[str, ...]], ...]


def data_folder() -> Path:
    """Return the wheel's data folder, without importing the package (its import needs its many dependencies).

    Raises:
        SystemExit: The wheel is not installed.
    """
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "The demo's data come in the bfcl-eval wheel, which is not installed. "
            "Run: pip install --no-deps bfcl-eval==2026.3.23"
        )
    return Path(next(iter(spec.submodule_search_locations))) / "data"


def load_trajectories(folder: Path) -> list[Trajectory]:
    """Return every task whose turns all have ground-truth calls, in file order."""
    documents = {entry["name"]: entry for entry in _documents(folder / "multi_turn_func_doc")}
    answers = {entry["id"]: entry["ground_truth"] for entry in _json_lines(folder / "possible_answer" / SPLIT)}
    trajectories = []
    for task in _json_lines(folder / SPLIT):
        calls = answers[task["id"]]
        if not all(calls):
            continue
        called = dict.fromkeys(_tool_name(call) for turn in calls for call in turn)
        trajectories.append(
            Trajectory(
                name=task["id"],
                tools=tuple({key: documents[name][key] for key in TOOL_KEYS} for name in called),
                turns=tuple(
                    ("\n".join(message["content"] for message in turn), tuple(answer))
                    for turn, answer in zip(task["question"], calls, strict=True)
                ),
            )
        )
    return trajectories


def rollouts(trajectory: Trajectory, encode: Encode) -> list[Rollout]:
    """Return one rollout per turn: ``tokens``, ``trained`` (0 or 1 per token) and ``group``, the trajectory's name.

    Each rollout's tokens are a strict prefix of the next one's. ``encode`` turns text into token ids and adds none.
    """
    system = "\n".join([INSTRUCTION, *(json.dumps(tool, separators=(",", ":")) for tool in trajectory.tools)])
    tokens = encode(f"<|im_start|>system\n{system}<|im_end|>\n")
    lines: list[Rollout] = []
    for user, calls in trajectory.turns:
        tokens = tokens + encode(f"<|im_start|>user\n{user}<|im_end|>\n") + encode("<|im_start|>assistant\n")
        answer = encode(f"[{', '.join(calls)}]<|im_end|>")
        trained = [0] * len(tokens) + [1] * len(answer)
        tokens = tokens + answer
        lines.append({"group": trajectory.name, "tokens": tokens, "trained": trained})
        tokens = tokens + encode("\n")
    return lines


def choose(groups: Sequence[list[Rollout]]) -> tuple[list[list[Rollout]], list[list[Rollout]]]:
    """Return (training, evaluation) trajectories: evenly spaced over those of a suitable length, so all tools occur.

    Raises:
        SystemExit: Fewer suitable trajectories than the demo needs.
    """
    suitable = [
        lines for lines in groups if len(lines) >= MIN_TURNS and MIN_ROWS <= len(lines[-1]["tokens"]) <= MAX_ROWS
    ]
    wanted = NUM_TRAIN + NUM_EVAL
    if len(suitable) < wanted:
        raise SystemExit(f"only {len(suitable)} trajectories are of a suitable length, {wanted} are needed")
    chosen = [suitable[index * len(suitable) // wanted] for index in range(wanted)]
    every = wanted // NUM_EVAL
    evaluation = chosen[every // 2 :: every]
    return [lines for lines in chosen if lines not in evaluation], evaluation


def count(groups: Iterable[list[Rollout]]) -> dict[str, float]:
    """Return requests, trained and logical tokens, packed rows (each trajectory a tree of its own) and their ratio."""
    groups = list(groups)
    logical = sum(len(line["tokens"]) for lines in groups for line in lines)
    packed = sum(len(lines[-1]["tokens"]) for lines in groups)
    return {
        "trajectories": len(groups),
        "requests": sum(len(lines) for lines in groups),
        "trained_tokens": sum(sum(line["trained"]) for lines in groups for line in lines),
        "logical_tokens": logical,
        "packed_rows": packed,
        "sharing_ratio": round(logical / packed, 2),
    }


def write(path: Path, groups: Iterable[list[Rollout]]) -> None:
    """Write the rollouts, one JSON document per line; the file appears by one rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    partial.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for lines in groups for line in lines))
    partial.replace(path)


def _tool_name(call: str) -> str:
    expression = ast.parse(call, mode="eval").body
    if not isinstance(expression, ast.Call) or not isinstance(expression.func, ast.Name):
        raise SystemExit(f"not a call of a named tool: {call!r}")
    return expression.func.id


def _documents(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*.json")):
        yield from _json_lines(path)


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def main(arguments: list[str]) -> int:
    """Write train.jsonl and eval.jsonl and print what they hold; return 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=CHECKOUT / ".cache" / "smollm2-135m")
    parser.add_argument("--out", type=Path, default=CHECKOUT / ".cache" / "demo")
    options = parser.parse_args(arguments)

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    trajectories = load_trajectories(data_folder())
    groups = [rollouts(one, lambda text: tokenizer.encode(text, add_special_tokens=False).ids) for one in trajectories]
    training, evaluation = choose(groups)
    for name, chosen in (("train", training), ("eval", evaluation)):
        write(options.out / f"{name}.jsonl", chosen)
        figures = [f"{key.replace('_', ' ')} {value:,}" for key, value in count(chosen).items()]
        print(f"data: {name}.jsonl: {', '.join(figures)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
