"""Words to token ids, with the model's own tokenizer and chat template; which of the ids are trained.

    messages[:k], generation prompt    <|user|>2 + 2?<|end|><|assistant|>
    messages[:k + 1]                   <|user|>2 + 2?<|end|><|assistant|>4<|end|>
    trained                                                             4<|end|>

The trained tokens of assistant message k are those that its rendering adds to the prompt the model would have been
given, so what is learnt is what would be sampled. That the earlier rendering is a true prefix of the later ones, token
by token, is checked and never repaired: a template that rewrites history trains on contexts the model never sees.
What follows the end-of-turn token (a line break, in most templates) is not trained, since it is never sampled.
A template that marks what the assistant generates (``{% generation %}``) is taken at its word instead.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Literal

import numpy as np

from trainer_rank.training.messages import Conversation, Message, Where, conversation_of, tools_of
from trainer_rank.training.rendering import Ids, Mask, Renderer, Tools

TrainOn = Literal["all", "last"]

_MARKER: Final = re.compile(r"\{%[-+]?\s*generation\b")


def encode_conversation(
    renderer: Renderer, where: Where, value: object, tools_value: object = None, *, train_on: TrainOn = "all"
) -> tuple[Ids, Mask]:
    """Return the ids (N,) of a line's ``messages`` and which are trained (N,).

    Raises:
        DataError: The messages or tools are malformed, the template refuses or drops a part of them, or writes
            earlier messages differently once later ones follow.
        ConfigError: The tokenizer has no chat template.
    """
    tools = tools_of(where, tools_value)
    template = renderer.template(tools)
    chat = conversation_of(where, value, template=template, only_last=train_on == "last")
    text = renderer.render(where, chat.messages, tools)
    renderer.check_tools(where, chat.messages, tools, text)
    renderer.check_calls(where, chat.messages, text)
    if renderer.tokenizer.is_fast and _MARKER.search(template):
        return _marked(renderer, where, chat, tools)
    ids = renderer.encode(text)
    mask = np.zeros(len(ids), dtype=np.bool_)
    for index in chat.trained:
        start, stop = _span(renderer, where, chat.messages, index, tools, text)
        mask[start:stop] = True
    return ids, mask


def _span(
    renderer: Renderer, where: Where, messages: Sequence[Message], index: int, tools: Tools, text: str
) -> tuple[int, int]:
    """Return the trained tokens of assistant message ``index``, half-open; ``text`` is the whole conversation."""
    if index == 0:
        where.fail(
            "messages[0]: an assistant message needs something before it to be trained; begin with a system or "
            "user message, or set its flag train to false"
        )
    before = renderer.render(where, messages[:index], tools, prompt=True)
    after = text if index + 1 == len(messages) else renderer.render(where, messages[: index + 1], tools)
    _check_prefix(renderer, where, index, before, after, "its own text is added")
    _check_prefix(renderer, where, index, after, text, "later messages are added")
    start, stop = len(renderer.encode(before)), len(renderer.encode(after))
    if start == stop:
        where.fail(f"messages[{index}]: the template adds no token for it, so there is nothing to train")
    return start, start + renderer.sampled(renderer.encode(after)[start:])


def _check_prefix(renderer: Renderer, where: Where, index: int, early: str, late: str, when: str) -> None:
    first, second = renderer.encode(early), renderer.encode(late)
    common = min(len(first), len(second))
    differ = np.flatnonzero(first[:common] != second[:common])
    if not differ.size and len(first) <= len(second):
        return
    position = int(differ[0]) if differ.size else common
    seen, now = (renderer.decode(ids[position : position + 4].tolist()) for ids in (first, second))
    if late.startswith(early):
        reason = "the tokenizer joins the text on both sides of a message's border into one token"
        step = "write the line as prompt and completion, which are encoded each by itself, or as token ids"
    else:
        reason = "the template writes the text before differently (some remove the thinking of earlier turns)"
        step = "write one line per assistant message and set data.train_on to last, or write token ids"
    where.fail(
        f"messages[{index}]: token {position} changes from {seen!r} to {now!r} when {when}: {reason}, "
        f"so it would be trained in a context the model never sees; {step}"
    )


def _marked(renderer: Renderer, where: Where, chat: Conversation, tools: Tools) -> tuple[Ids, Mask]:
    """Return the ids and what the template marks; one run of marked tokens per assistant message, in order."""
    found = renderer.tokenizer.apply_chat_template(
        list(chat.messages), tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    ids = np.asarray(found["input_ids"], dtype=np.int64)
    mask = np.asarray(found["assistant_masks"], dtype=np.bool_)
    if chat.trained == chat.assistants:
        if chat.trained and not mask.any():
            where.fail("messages: the template marks no token of the assistant's; nothing could be trained")
        return ids, mask
    starts = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0) == 1)
    if len(starts) != len(chat.assistants):
        where.fail(
            f"messages: the template marks {len(starts)} runs of tokens for {len(chat.assistants)} assistant "
            "messages, so it is not known which belong to a message that is left out; train all messages, or "
            "write one line per assistant message as token ids"
        )
    run = np.searchsorted(starts, np.arange(len(ids)), side="right") - 1
    wanted = [number for number, index in enumerate(chat.assistants) if index in chat.trained]
    return ids, mask & np.isin(run, wanted)
