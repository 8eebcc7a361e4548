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
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal, Self

import numpy as np
import numpy.typing as npt

from trainer_rank.errors import ConfigError
from trainer_rank.training.messages import FLAGS, Conversation, Message, Where, conversation_of, show, tools_of

TrainOn = Literal["all", "last"]
Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Tools = list[dict[str, Any]] | None

# Texts whose ids are kept: the turns of one conversation, and the completions of one prompt, lie near each other.
_KEPT_TEXTS: Final = 512
_MARKER: Final = re.compile(r"\{%[-+]?\s*generation\b")


class Chat:
    """A tokenizer with its chat template, and which assistant messages are trained."""

    def __init__(self, tokenizer: Any, *, train_on: TrainOn = "all") -> None:
        self._tokenizer = tokenizer
        self._only_last = train_on == "last"
        self._kept: OrderedDict[str, Ids] = OrderedDict()

    @classmethod
    def load(cls, path: str, *, train_on: TrainOn = "all") -> Self:
        """Return the tokenizer in the folder ``path``; nothing is downloaded.

        Raises:
            ConfigError: There is none that Transformers can read.
        """
        folder = Path(path).parent if Path(path).name == "config.json" else Path(path)
        if not folder.is_dir():
            raise ConfigError(
                f"the data hold words, and the model {path!r} is not a folder, so it has no tokenizer; give the "
                "model's folder, or write the data as token ids"
            )
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ConfigError(
                f"the data hold words, and the model {path!r} holds no tokenizer that Transformers can read "
                f"({_one_line(error)}); add its tokenizer files, or write the data as token ids"
            ) from error
        return cls(tokenizer, train_on=train_on)

    def conversation(self, where: Where, value: object, tools_value: object = None) -> tuple[Ids, Mask]:
        """Return the ids (N,) of a line's ``messages`` and which are trained (N,).

        Raises:
            DataError: The messages or tools are malformed, the template refuses or drops a part of them, or writes
                earlier messages differently once later ones follow.
            ConfigError: The tokenizer has no chat template.
        """
        tools = tools_of(where, tools_value)
        template = self._template(tools)
        chat = conversation_of(where, value, template=template, only_last=self._only_last)
        text = self._render(where, chat.messages, tools)
        self._check_tools(where, chat.messages, tools, text)
        if _MARKER.search(template):
            return self._marked(where, chat, tools)
        ids = self._encode(text)
        mask = np.zeros(len(ids), dtype=np.bool_)
        for index in chat.trained:
            start, stop = self._span(where, chat.messages, index, tools, text)
            mask[start:stop] = True
        return ids, mask

    def pair(self, where: Where, prompt: object, completion: object, tools_value: object = None) -> tuple[Ids, Mask]:
        """Return the ids (N,) of a line's ``prompt`` and ``completion`` and which are trained (N,): the completion's.

        Both are texts, or both are lists of messages; each is encoded by itself, so that requests of one prompt share
        all of its tokens.

        Raises:
            DataError, ConfigError: As ``conversation``.
        """
        if isinstance(prompt, str) and isinstance(completion, str):
            if tools_value not in (None, []):
                where.fail("tools: need a chat template, and prompt is a text; write prompt as a list of messages")
            first, second = self._texts(where, prompt, completion)
        elif isinstance(prompt, list) and isinstance(completion, list):
            first, second = self._turn(where, prompt, completion, tools_of(where, tools_value))
        else:
            where.fail(
                "prompt and completion: must both be texts or both lists of messages, "
                f"got {show(prompt)} and {show(completion)}"
            )
        ids = np.concatenate([first, second])
        mask = np.zeros(len(ids), dtype=np.bool_)
        mask[len(first) : len(first) + self._sampled(second)] = True
        return ids, mask

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _template(self, tools: Tools) -> str:
        try:
            return str(self._tokenizer.get_chat_template(tools=tools))
        except ValueError as error:
            raise ConfigError(
                "the data hold messages, and the model's tokenizer has no chat template; add its chat_template.jinja, "
                "use the instruction-tuned model, or write the data as prompt and completion texts or as token ids"
            ) from error

    def _render(self, where: Where, messages: Sequence[Message], tools: Tools, *, prompt: bool = False) -> str:
        from jinja2 import TemplateError

        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tools=tools, add_generation_prompt=prompt, tokenize=False
                )
            )
        # A template runs on whatever the messages hold; besides its own errors it can meet these.
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            where.fail(
                f"messages: the model's chat template refuses the first {len(messages)} of them: {_one_line(error)}; "
                "change the messages to what the template expects"
            )

    def _check_tools(self, where: Where, messages: Sequence[Message], tools: Tools, text: str) -> None:
        if tools is not None and self._render(where, messages, None) == text:
            where.fail(
                f"tools: the model's chat template drops them (the text is the same without the {len(tools)} tools); "
                "describe the tools in the system message instead"
            )

    def _encode(self, text: str) -> Ids:
        # Without the tokenizer's own special tokens: a template writes the first token of a sequence itself.
        found = self._kept.pop(text, None)
        if found is None:
            found = np.asarray(self._tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)
        self._kept[text] = found
        if len(self._kept) > _KEPT_TEXTS:
            self._kept.popitem(last=False)
        return found

    def _span(self, where: Where, messages: Sequence[Message], index: int, tools: Tools, text: str) -> tuple[int, int]:
        """Return the trained tokens of assistant message ``index``, half-open; ``text`` is the whole conversation."""
        if index == 0:
            where.fail(
                "messages[0]: an assistant message needs something before it to be trained; begin with a system or "
                "user message, or set its flag train to false"
            )
        before = self._render(where, messages[:index], tools, prompt=True)
        after = text if index + 1 == len(messages) else self._render(where, messages[: index + 1], tools)
        self._check_prefix(where, index, before, after, "its own text is added")
        self._check_prefix(where, index, after, text, "later messages are added")
        start, stop = len(self._encode(before)), len(self._encode(after))
        if start == stop:
            where.fail(f"messages[{index}]: the template adds no token for it, so there is nothing to train")
        return start, start + self._sampled(self._encode(after)[start:])

    def _check_prefix(self, where: Where, index: int, early: str, late: str, when: str) -> None:
        first, second = self._encode(early), self._encode(late)
        common = min(len(first), len(second))
        differ = np.flatnonzero(first[:common] != second[:common])
        if not differ.size and len(first) <= len(second):
            return
        position = int(differ[0]) if differ.size else common
        seen, now = (self.decode(ids[position : position + 4].tolist()) for ids in (first, second))
        if late.startswith(early):
            reason = "the tokenizer joins the text on both sides of a message's border into one token"
            step = "begin the message's content without white space, or write this line as token ids"
        else:
            reason = "the template writes the text before differently (some remove the thinking of earlier turns)"
            step = "write one line per assistant message and set data.train_on to last, or write token ids"
        where.fail(
            f"messages[{index}]: token {position} changes from {seen!r} to {now!r} when {when}: {reason}, "
            f"so it would be trained in a context the model never sees; {step}"
        )

    def _sampled(self, ids: Ids) -> int:
        """Return how many of a turn's ids are sampled: all up to the end-of-turn token if only space follows it."""
        end = self._tokenizer.eos_token_id
        ends = np.flatnonzero(ids == end) if end is not None else np.empty(0, dtype=np.int64)
        if not ends.size:
            return len(ids)
        stop = int(ends[-1]) + 1
        return len(ids) if self.decode(ids[stop:].tolist()).strip() else stop

    def _marked(self, where: Where, chat: Conversation, tools: Tools) -> tuple[Ids, Mask]:
        """Return the ids and what the template marks; one run of marked tokens per assistant message, in order."""
        found = self._tokenizer.apply_chat_template(
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

    def _texts(self, where: Where, prompt: str, completion: str) -> tuple[Ids, Ids]:
        """Return the ids of two texts: the tokenizer's first token, if it has one, and at the end its last."""
        tokenizer = self._tokenizer
        if tokenizer.eos_token_id is None:
            raise ConfigError("a completion text ends with the tokenizer's EOS token, and the tokenizer has none")
        self._check_alone()
        first, second = self._encode(prompt), self._encode(completion)
        added = tokenizer("")["input_ids"][:1]
        if added and added[0] == tokenizer.bos_token_id and first[:1].tolist() != added:
            first = np.concatenate([np.asarray(added, dtype=np.int64), first])
        if not len(first):
            where.fail("prompt: must hold at least one token, got an empty text; nothing would predict the completion")
        if second[-1:].tolist() != [tokenizer.eos_token_id]:
            second = np.append(second, tokenizer.eos_token_id)
        return first, second

    def _turn(self, where: Where, prompt: list[object], completion: list[object], tools: Tools) -> tuple[Ids, Ids]:
        """Return the ids of a prompt of messages and of the one assistant message that answers it."""
        template = self._template(tools)
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
        self._check_alone()
        early = self._render(where, before, tools, prompt=True)
        late = self._render(where, [*before, *answer.messages], tools)
        self._check_tools(where, before, tools, self._render(where, before, tools))
        if not late.startswith(early):
            where.fail(
                "completion: the template writes the prompt differently once the completion follows; "
                "write this line as token ids"
            )
        return self._encode(early), self._encode(late[len(early) :])

    def _check_alone(self) -> None:
        line, both = self._encode("\n"), self._encode("\na")
        if both.tolist() != [*line.tolist(), *self._encode("a").tolist()]:
            raise ConfigError(
                "the tokenizer puts a space before every text that it encodes, so prompt and completion cannot be "
                "encoded each by itself; write the data as messages or token ids"
            )


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
