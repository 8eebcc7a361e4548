"""What a line in words holds: messages, tools, a prompt and its completion, checked before a template sees them.

    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}

Pure: no tokenizer, no torch. A fault names the field down to the message and key at fault.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from trainer_rank.errors import DataError

Message = dict[str, Any]

# Keys every template is expected to know what to do with; any other must occur in the template's own text.
COMMON_KEYS: Final = ("role", "content", "name", "tool_call_id")
# What says whether an assistant message is trained. Two spellings, because data of both kinds exist.
FLAGS: Final = ("train", "trained")
_USUAL_KEYS: Final = (*COMMON_KEYS, "tool_calls", "reasoning_content", "thinking", *FLAGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """A line of a file, to be named in a refusal."""

    path: Path
    line: int

    def fail(self, message: str) -> NoReturn:
        """Raise ``DataError`` for this line."""
        raise DataError(message, path=self.path, line=self.line)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages as the template gets them, and which of them are trained.

    Attributes:
        messages: Without the keys that say what is trained.
        trained: Indices of the assistant messages that are trained, ascending.
        assistants: Indices of all assistant messages, ascending.
    """

    messages: Sequence[Message]
    trained: tuple[int, ...]
    assistants: tuple[int, ...]


def conversation_of(
    where: Where, value: object, *, template: str, field: str = "messages", only_last: bool = False
) -> Conversation:
    """Return the conversation that ``value`` describes.

    Args:
        where: The line, for refusals.
        value: What the line holds under ``field``.
        template: Text of the chat template; a key that is neither usual nor in it would be dropped silently.
        field: Name of the field in refusals.
        only_last: Train the last assistant message alone.

    Raises:
        DataError: It is not a list of messages, or one of them breaks a rule.
    """
    if not isinstance(value, list) or not value:
        where.fail(f"{field}: must be a list of at least one message, got {show(value)}")
    messages, trained, assistants = [], [], []
    for index, message in enumerate(value):
        name = f"{field}[{index}]"
        _check_message(where, name, message, template)
        flag = _flag(where, name, message)
        if message["role"] == "assistant":
            assistants.append(index)
            if flag is not False:
                trained.append(index)
        elif flag:
            where.fail(
                f"{name}: only assistant messages can be trained, got the role {message['role']!r}; "
                "leave out its flag, or set it to false"
            )
        messages.append({key: entry for key, entry in message.items() if key not in FLAGS})
    if only_last:
        trained = [index for index in trained if index == assistants[-1]]
    return Conversation(messages=messages, trained=tuple(trained), assistants=tuple(assistants))


def tools_of(where: Where, value: object) -> list[dict[str, Any]] | None:
    """Return the tools that ``value`` describes: a list of JSON objects, or a text that holds one; None without tools.

    Raises:
        DataError: It is neither.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            where.fail(f"tools: a text must hold a JSON list of tools, got {show(value)} ({error})")
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        where.fail(f"tools: must be a list of JSON objects, one per tool, got {show(value)}")
    return value


def show(value: object) -> str:
    """Return a value and its type for a message, cut to a readable length."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} of type {type(value).__name__}"


def _check_message(where: Where, name: str, message: object, template: str) -> None:
    if not isinstance(message, dict):
        where.fail(f"{name}: must be an object with the keys role and content, got {show(message)}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        where.fail(f"{name}.role: must be a text such as 'user' or 'assistant', got {show(role)}")
    for key in message:
        if key in FLAGS or key in COMMON_KEYS or key in template:
            continue
        near = difflib.get_close_matches(key, _USUAL_KEYS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near and near[0] != key else "; write it into content, or leave it out"
        where.fail(f"{name}.{key}: the model's chat template does not use this key, so it would be lost{hint}")
    content = message.get("content")
    if content is None and (message.get("tool_calls") or any(key not in COMMON_KEYS for key in message)):
        return
    if not isinstance(content, str):
        where.fail(f"{name}.content: must be a text, got {show(content)}")


def _flag(where: Where, name: str, message: Message) -> bool | None:
    given = [key for key in FLAGS if key in message]
    if not given:
        return None
    if len(given) > 1:
        where.fail(f"{name}: {' and '.join(given)} mean the same; keep one")
    flag = message[given[0]]
    if type(flag) not in (bool, int) or flag not in (0, 1):
        where.fail(f"{name}.{given[0]}: must be true or false, got {show(flag)}")
    return bool(flag)
