"""A prompt and its completion to token ids: two texts, or messages and the one assistant message that answers them.

    prompt ids | completion ids        only the completion's are trained

Each side is encoded by itself, so every completion of a prompt has the same prefix, token by token, and shares it.
"""

from __future__ import annotations

import numpy as np

from trainer_rank.errors import ConfigError
from trainer_rank.training.messages import FLAGS, Where, conversation_of, show, tools_of
from trainer_rank.training.rendering import Ids, Mask, Renderer, Tools


def encode_pair(
    renderer: Renderer, where: Where, prompt: object, completion: object, tools_value: object = None
) -> tuple[Ids, Mask]:
    """Return the ids (N,) of a line's ``prompt`` and ``completion`` and which are trained (N,): the completion's.

    Both are texts, or both are lists of messages; each is encoded by itself, so that requests of one prompt share
    all of its tokens.

    Raises:
        DataError, ConfigError: As ``encode_conversation``.
    """
    if isinstance(prompt, str) and isinstance(completion, str):
        if tools_value not in (None, []):
            where.fail("tools: need a chat template, and prompt is a text; write prompt as a list of messages")
        first, second = _texts(renderer, where, prompt, completion)
    elif isinstance(prompt, list) and isinstance(completion, list):
        first, second = _turn(renderer, where, prompt, completion, tools_of(where, tools_value))
    else:
        where.fail(
            "prompt and completion: must both be texts or both lists of messages, "
            f"got {show(prompt)} and {show(completion)}"
        )
    ids = np.concatenate([first, second])
    mask = np.zeros(len(ids), dtype=np.bool_)
    mask[len(first) : len(first) + renderer.sampled(second)] = True
    return ids, mask


def _texts(renderer: Renderer, where: Where, prompt: str, completion: str) -> tuple[Ids, Ids]:
    """Return the ids of two texts: the tokenizer's first token, if it has one, and at the end its last."""
    tokenizer = renderer.tokenizer
    if tokenizer.eos_token_id is None:
        raise ConfigError("a completion text ends with the tokenizer's EOS token, and the tokenizer has none")
    _check_alone(renderer)
    first, second = renderer.encode(prompt), renderer.encode(completion)
    added = tokenizer("")["input_ids"][:1]
    if added and added[0] == tokenizer.bos_token_id and first[:1].tolist() != added:
        first = np.concatenate([np.asarray(added, dtype=np.int64), first])
    if not len(first):
        where.fail("prompt: must hold at least one token, got an empty text; nothing would predict the completion")
    if second[-1:].tolist() != [tokenizer.eos_token_id]:
        second = np.append(second, tokenizer.eos_token_id)
    return first, second


def _turn(
    renderer: Renderer, where: Where, prompt: list[object], completion: list[object], tools: Tools
) -> tuple[Ids, Ids]:
    """Return the ids of a prompt of messages and of the one assistant message that answers it."""
    template = renderer.template(tools)
    before = conversation_of(where, prompt, template=template, field="prompt").messages
    for index, message in enumerate(prompt):
        if isinstance(message, dict) and any(flag in message for flag in FLAGS):
            where.fail(f"prompt[{index}]: nothing of a prompt is trained; leave out the flag, or write messages")
    answer = conversation_of(where, completion, template=template, field="completion")
    if len(answer.messages) != 1 or answer.assistants != (0,):
        roles = ", ".join(str(message["role"]) for message in answer.messages)
        where.fail(
            f"completion: must be one assistant message, got {len(answer.messages)} of the roles {roles}; "
            "write the whole conversation as messages, with train: false where nothing is learnt"
        )
    if not answer.trained:
        where.fail("completion[0]: is what this line trains, and its flag says not to; leave the flag out")
    _check_alone(renderer)
    early = renderer.render(where, before, tools, prompt=True)
    late = renderer.render(where, [*before, *answer.messages], tools)
    renderer.check_tools(where, before, tools, renderer.render(where, before, tools))
    renderer.check_calls(where, [*before, *answer.messages], late)
    if not late.startswith(early):
        where.fail(
            "completion: the template writes the prompt differently once the completion follows; "
            "write this line as token ids"
        )
    return renderer.encode(early), renderer.encode(late[len(early) :])


def _check_alone(renderer: Renderer) -> None:
    line, both = renderer.encode("\n"), renderer.encode("\na")
    if both.tolist() != [*line.tolist(), *renderer.encode("a").tolist()]:
        raise ConfigError(
            "the tokenizer encodes a text differently where it begins than after other text (most put a space there), "
            "so prompt and completion cannot be encoded each by itself; write the data as messages or token ids"
        )
