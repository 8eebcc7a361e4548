"""Small tokenizers with chat templates of different habits, for tests: one token per character, and special tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# Every message alike; the smallest template that is honest.
PLAIN = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Marks what the assistant generates, its end included.
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<e>"
    "{% endgeneration %}{% else %}{{ m.content }}<e>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Removes the thinking of every turn but the last.
REWRITES = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if loop.last %}{{ m.content }}{% else %}{{ m.content.split('#')[-1] }}{% endif %}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Refuses two messages of one role.
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}<e>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Renders tools and calls.
TOOLS = (
    "{% if tools %}<system>{% for t in tools %}{{ (t.function or t).name }};{% endfor %}<e>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}"
    "{% if c.function.arguments %} {{ c.function.arguments | tojson }}{% endif %}]{% endfor %}<e>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

SPECIAL = ("<s>", "<e>", "<user>", "<assistant>", "<system>", "<tool>")


def make_tokenizer(template: str | None, *, merges: tuple[str, ...] = (), eos: str | None = "<e>") -> Any:
    """Return a tokenizer of printable ASCII; ``merges`` are texts of two characters that become one token."""
    letters = [*map(chr, range(32, 127)), "\n"]
    vocabulary = {text: number for number, text in enumerate([*SPECIAL, *letters, *merges, "?unknown"])}
    core = Tokenizer(models.BPE(vocabulary, [(one[0], one[1]) for one in merges], unk_token="?unknown"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n\S|[^\n]"), "isolated") if merges else None  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token=eos, additional_special_tokens=list(SPECIAL[2:])
    )
    tokenizer.chat_template = template
    return tokenizer


def save_tokenizer(folder: Path, template: str | None) -> Path:
    """Write a tokenizer into a model's folder and return it."""
    make_tokenizer(template).save_pretrained(folder)
    return folder
