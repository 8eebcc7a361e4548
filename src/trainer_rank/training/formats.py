"""The formats a line of data may have, and how each becomes token ids. Imports no torch until words are met.

    tokens, trained              token ids                     as they are
    messages [, tools]           a conversation                the model's chat template
    prompt, completion           two texts, or two lists of    each encoded by itself
                                 messages [, tools]

``group``, ``weight`` and what a loss needs stand beside any of them. Where a line holds words, a list such as
``old_logprobs`` has one entry per trained token, in order, since only those were sampled.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from trainer_rank.errors import ConfigError
from trainer_rank.training.chat import TrainOn, encode_conversation
from trainer_rank.training.messages import Where, show
from trainer_rank.training.pairs import encode_pair
from trainer_rank.training.rendering import Mask, Renderer
from trainer_rank.training.rollouts import FIELDS

_IDS: Final = ("tokens", "trained")
_FORMATS: Final = {"tokens": _IDS, "messages": ("messages", "tools"), "prompt": ("prompt", "completion", "tools")}
_WORDS: Final = ("messages", "prompt", "completion", "tools")
ALL_FIELDS: Final = (*FIELDS, *_WORDS)
# Lists with one entry per token in a line of ids, and one per trained token in a line of words.
_PER_TOKEN: Final = ("old_logprobs", "ref_logprobs", "advantages")


@dataclass(slots=True, kw_only=True)
class Words:
    """The model's tokenizer, loaded with the first line that holds words.

    Attributes:
        model: Folder with the tokenizer; None where no model is named.
        train_on: Which assistant messages are trained.
        conversations: Lines of messages met so far, in all files.
    """

    model: str | None = None
    train_on: TrainOn = "all"
    conversations: int = field(default=0, init=False)
    _renderer: Renderer | None = field(default=None, init=False)

    def renderer(self) -> Renderer:
        """Return the tokenizer.

        Raises:
            ConfigError: No model is named, or its folder holds no tokenizer.
        """
        if self._renderer is None:
            if self.model is None:
                raise ConfigError(
                    "the data hold words (messages, or prompt and completion), and no model is named whose tokenizer "
                    "turns them into token ids; give --model with the model's folder"
                )
            self._renderer = Renderer.load(self.model)
        return self._renderer

    def decoder(self) -> Callable[[Sequence[int]], str] | None:
        """Return what turns ids into text; None where the model's folder holds no tokenizer."""
        try:
            return self.renderer().decode
        except ConfigError:
            return None


def check_names(where: Where, names: list[str]) -> str:
    """Return the field that names the format of a line with these fields: tokens, messages or prompt.

    Raises:
        DataError: A field is unknown, or the fields are of no format or of two.
    """
    for name in names:
        if name not in ALL_FIELDS:
            close = difflib.get_close_matches(name, ALL_FIELDS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the fields are {', '.join(ALL_FIELDS)}"
            where.fail(f"unknown field {name!r}; {hint}")
    found = [name for name in _FORMATS if name in names]
    if not found:
        if "completion" in names:
            where.fail("prompt: is required beside completion; write both, or messages")
        # A line of ids without its ids is explained by the reader of ids.
        return "tokens"
    if len(found) > 1:
        where.fail(f"{' and '.join(found)} are different formats of one line; keep one of them")
    for name in names:
        if name in (*_IDS, *_WORDS) and name not in _FORMATS[found[0]]:
            where.fail(f"{name}: does not belong beside {found[0]}; {_belongs(name)}")
    return found[0]


def token_entries(where: Where, entries: dict[str, Any], words: Words) -> dict[str, Any]:
    """Return a line of any format as a line of ids, for ``rollout_of`` to check.

    Raises:
        DataError: The line is malformed, or the template cannot honour it.
        ConfigError: The line holds words and there is no tokenizer, or it has no chat template.
    """
    kind = check_names(where, list(entries))
    if kind == "tokens":
        return entries
    renderer, tools = words.renderer(), entries.get("tools")
    if kind == "messages":
        words.conversations += 1
        ids, mask = encode_conversation(renderer, where, entries["messages"], tools, train_on=words.train_on)
    else:
        if "completion" not in entries:
            where.fail("completion: is required beside prompt; write what is to be learnt")
        ids, mask = encode_pair(renderer, where, entries["prompt"], entries["completion"], tools)
    line = {name: value for name, value in entries.items() if name not in _WORDS}
    line.update({name: _spread(where, name, line[name], mask) for name in _PER_TOKEN if line.get(name) is not None})
    return {"tokens": ids.tolist(), "trained": mask.astype(int).tolist(), **line}


def _spread(where: Where, name: str, values: object, mask: Mask) -> object:
    """Return one entry per token, null where nothing is trained, from one entry per trained token."""
    if not isinstance(values, list):
        where.fail(f"{name}: must be a list with one entry per trained token, got {show(values)}")
    wanted = int(mask.sum())
    if len(values) != wanted:
        where.fail(
            f"{name}: must have one entry per trained token, got {len(values)} entries for {wanted} trained tokens; "
            "the sampler's tokenisation differs from this one, or its end-of-turn token is missing: write token ids"
        )
    result: list[Any] = [None] * len(mask)
    for position, value in zip(mask.nonzero()[0].tolist(), values, strict=True):
        result[position] = value
    return result


def _belongs(name: str) -> str:
    if name == "trained":
        return "a message says itself whether it is trained, with the key train"
    if name == "tools":
        return "tools are rendered by a chat template, from messages; token ids contain them already"
    return f"{name} is part of a line of prompt and completion"
