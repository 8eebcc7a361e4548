"""Write the conversations of the examples: real multi-turn tool use, as messages and as preference pairs.

    python examples/prepare_conversations.py [--out .cache/examples] [--conversations 16]

Source: the Berkeley Function Calling Leaderboard, multi-turn base, in the ``bfcl-eval`` wheel (as for the demo).

    chats.jsonl      one line per conversation: messages; every assistant message is trained
    held_out.jsonl   the same, of conversations that are in neither other file
    pairs.jsonl      two lines per turn: the right calls (chosen) and the calls of another turn (rejected)
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "demo"))

from prepare_data import INSTRUCTION, Trajectory, data_folder, load_trajectories

CHECKOUT = Path(__file__).resolve().parents[1]
Message = dict[str, Any]


def system_message(trajectory: Trajectory) -> Message:
    """Return the message with the tools; the model's chat template has no place of its own for them."""
    documents = (json.dumps(tool, separators=(",", ":")) for tool in trajectory.tools)
    return {"role": "system", "content": "\n".join([INSTRUCTION, *documents])}


def answer(calls: tuple[str, ...]) -> Message:
    """Return the assistant's message with the calls of a turn."""
    return {"role": "assistant", "content": f"[{', '.join(calls)}]"}


def chat(trajectory: Trajectory) -> dict[str, Any]:
    """Return the whole conversation as one line."""
    messages = [system_message(trajectory)]
    for user, calls in trajectory.turns:
        messages += [{"role": "user", "content": user}, answer(calls)]
    return {"messages": messages, "group": trajectory.name}


def pairs(trajectory: Trajectory, most: int) -> list[dict[str, Any]]:
    """Return up to ``most`` pairs: a turn's own calls against those of the conversation's next other turn."""
    prompt, turns = [system_message(trajectory)], trajectory.turns
    lines: list[dict[str, Any]] = []
    for number, (user, calls) in enumerate(turns):
        prompt = [*prompt, {"role": "user", "content": user}]
        others = [other for _, other in (*turns[number + 1 :], *turns[:number]) if other != calls]
        if others and len(lines) < 2 * most:
            for right in (True, False):
                completion = [answer(calls if right else others[0])]
                lines.append(
                    {
                        "prompt": prompt, "completion": completion, "chosen": right,
                        "pair": f"turn {number}", "group": trajectory.name,
                    }
                )  # fmt: skip
        prompt = [*prompt, answer(calls)]
    return lines


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write JSON lines and say so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    print(f"{path.name}: {len(lines)} lines")


def main(arguments: list[str]) -> int:
    """Write the three files; return 0."""
    parser = argparse.ArgumentParser(description="Write the conversations of the examples")
    parser.add_argument("--out", type=Path, default=CHECKOUT / ".cache" / "examples")
    parser.add_argument("--conversations", type=int, default=16, help="in training; a quarter as many are held out")
    options = parser.parse_args(arguments)
    # The shortest, so that a step takes seconds on a laptop.
    known = sorted(load_trajectories(data_folder()), key=lambda one: (len(json.dumps(chat(one))), one.name))
    held = options.conversations // 4
    chosen = known[: options.conversations + held]
    every = max(1, len(chosen) // max(1, held))
    evaluation = chosen[every - 1 :: every][:held]
    training = [one for one in chosen if one not in evaluation]
    write(options.out / "chats.jsonl", [chat(one) for one in training])
    write(options.out / "held_out.jsonl", [chat(one) for one in evaluation])
    write(options.out / "pairs.jsonl", [line for one in training for line in pairs(one, most=2)])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
