"""A model's tokenizer and chat template: messages to text, text to token ids, and what of a turn is sampled."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from trainer_rank.errors import ConfigError
from trainer_rank.training.messages import Message, Where

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Tools = list[dict[str, Any]] | None

# Texts whose ids are kept: the turns of one conversation, and the completions of one prompt, lie near each other.
_KEPT_TEXTS: Final = 512


class Renderer:
    """One tokenizer with its chat template. Texts that were just encoded are not encoded again."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        special = [number for number, one in tokenizer.added_tokens_decoder.items() if one.special]
        self._special = np.asarray(sorted({*special, *tokenizer.all_special_ids}), dtype=np.int64)
        self._kept: OrderedDict[str, Ids] = OrderedDict()

    @classmethod
    def load(cls, path: str) -> Self:
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
        return cls(tokenizer)

    def template(self, tools: Tools) -> str:
        """Return the text of the template for messages with these tools.

        Raises:
            ConfigError: The tokenizer has none.
        """
        try:
            return str(self.tokenizer.get_chat_template(tools=tools))
        except ValueError as error:
            raise ConfigError(
                "the data hold messages, and the model's tokenizer has no chat template; add its chat_template.jinja, "
                "use the instruction-tuned model, or write the data as prompt and completion texts or as token ids"
            ) from error

    def render(self, where: Where, messages: Sequence[Message], tools: Tools, *, prompt: bool = False) -> str:
        """Return the text of the messages; with ``prompt``, up to where the assistant's next message begins.

        Raises:
            DataError: The template refuses the messages; in its own words.
        """
        from jinja2 import TemplateError

        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages), tools=tools, add_generation_prompt=prompt, tokenize=False
                )
            )
        # A template runs on whatever the messages hold; besides its own errors it can meet these.
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            where.fail(
                f"the model's chat template refuses the first {len(messages)} messages: {_one_line(error)}; "
                "change them to what the template expects"
            )

    def check_tools(self, where: Where, messages: Sequence[Message], tools: Tools, text: str) -> None:
        """Raise ``DataError`` if ``text``, the messages with tools, is the same without them."""
        if tools is not None and self.render(where, messages, None) == text:
            where.fail(
                "tools: the model's chat template drops them (the text is the same without them); "
                "describe the tools in the system message instead"
            )

    def check_calls(self, where: Where, messages: Sequence[Message], text: str) -> None:
        """Raise ``DataError`` if ``text``, the messages, quotes a call's arguments that are JSON already."""
        for index, message in enumerate(messages):
            calls = message.get("tool_calls")
            for call in calls if isinstance(calls, list) else []:
                function = call.get("function", call) if isinstance(call, dict) else None
                arguments = function.get("arguments") if isinstance(function, dict) else None
                if not isinstance(arguments, str) or '"' not in arguments:
                    continue
                if any(json.dumps(arguments, ensure_ascii=plain) in text for plain in (False, True)):
                    where.fail(
                        f"messages[{index}].tool_calls: the arguments are a text, and the model's chat template writes "
                        "them as JSON once more, in quotes; write them as a JSON object"
                    )

    def encode(self, text: str) -> Ids:
        """Return the ids (N,) of a text, which may spell special tokens; none is added."""
        # Without the tokenizer's own special tokens: a template writes the first token of a sequence itself.
        found = self._kept.pop(text, None)
        if found is None:
            found = np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)
        self._kept[text] = found
        if len(self._kept) > _KEPT_TEXTS:
            self._kept.popitem(last=False)
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def sampled(self, ids: Ids) -> int:
        """Return how many of a turn's ids are sampled: all up to its last special token if only space follows it."""
        ends = np.flatnonzero(np.isin(ids, self._special))
        if not ends.size:
            return len(ids)
        stop = int(ends[-1]) + 1
        return len(ids) if self.decode(ids[stop:].tolist()).strip() else stop


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
