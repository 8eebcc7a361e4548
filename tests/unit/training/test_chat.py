"""Words to token ids: which tokens are trained, and which templates are refused."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.training.chat_models import ALTERNATES, MARKED, PLAIN, REWRITES, TOOLS, make_tokenizer
from trainer_rank.errors import ConfigError, DataError
from trainer_rank.training.chat import TrainOn, encode_conversation
from trainer_rank.training.messages import Where
from trainer_rank.training.pairs import encode_pair
from trainer_rank.training.rendering import Ids, Mask, Renderer

MODEL = Path(__file__).parents[3] / ".cache" / "smollm2-135m"
WHERE = Where(path=Path("data.jsonl"), line=7)
needs_model = pytest.mark.skipif(not (MODEL / "tokenizer.json").is_file(), reason="the model is not prepared")


def say(*contents: str, **flags: Any) -> list[dict[str, Any]]:
    """Return messages of the user and the assistant in turn; ``m1=...`` adds keys to message 1."""
    messages: list[dict[str, Any]] = [
        {"role": ("user", "assistant")[index % 2], "content": content} for index, content in enumerate(contents)
    ]
    for name, extra in flags.items():
        messages[int(name[1:])].update(extra)
    return messages


@dataclass(frozen=True)
class Chat:
    """A tokenizer, and what of a conversation is trained."""

    renderer: Renderer
    train_on: TrainOn = "all"

    def conversation(self, messages: object, tools: object = None) -> tuple[Ids, Mask]:
        """Return ids and mask of a line of messages."""
        return encode_conversation(self.renderer, WHERE, messages, tools, train_on=self.train_on)

    def pair(self, prompt: object, completion: object, tools: object = None) -> tuple[Ids, Mask]:
        """Return ids and mask of a line of prompt and completion."""
        return encode_pair(self.renderer, WHERE, prompt, completion, tools)

    def decode(self, ids: list[int]) -> str:
        """Return the text."""
        return self.renderer.decode(ids)


def chat(template: str | None = PLAIN, *, train_on: TrainOn = "all", **options: Any) -> Chat:
    """Return the conversations of a small tokenizer."""
    return Chat(Renderer(make_tokenizer(template, **options)), train_on)


def texts(one: Chat, ids: Any, mask: Any) -> tuple[str, str]:
    """Return the whole text, and the trained tokens' text."""
    return one.decode(ids.tolist()).replace(" ", ""), one.decode(ids[mask].tolist()).replace(" ", "")


def refusal(one: Chat, messages: object, tools: object = None) -> str:
    """Return what a refused line says."""
    with pytest.raises(DataError) as caught:
        one.conversation(messages, tools)
    assert str(caught.value).startswith("data.jsonl:7: ")
    return str(caught.value)


def test_the_assistant_s_text_and_its_end_are_trained() -> None:
    """Not the template's line break after the end of a turn: nobody samples it. The first token is there once."""
    one = chat()
    whole, trained = texts(one, *one.conversation(say("ab", "cd", "ef", "gh")))
    assert whole == "<s><user>ab<e>\n<assistant>cd<e>\n<user>ef<e>\n<assistant>gh<e>\n"
    assert trained == "cd<e>gh<e>"


@pytest.mark.parametrize("flag", ["train", "trained"])
@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_message_may_be_left_out(flag: str, template: str) -> None:
    """By its own flag, whether the template marks or not; the tokens stay."""
    one = chat(template)
    whole, trained = texts(one, *one.conversation(say("ab", "cd", "ef", "gh", m1={flag: False})))
    assert "cd<e>" in whole
    assert trained == "gh<e>"


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_the_last_message_alone_may_be_trained(template: str) -> None:
    """``train_on: last`` trains the last answer, also where the user has the last word."""
    one = chat(template, train_on="last")
    assert texts(one, *one.conversation(say("ab", "cd", "ef", "gh", "ij")))[1] == "gh<e>"


def test_marks_and_prefixes_agree() -> None:
    """A template with marks trains the same tokens as the same template without them."""
    marked, plain = chat(MARKED), chat(PLAIN.replace("{{ bos_token }}", ""))
    messages = say("ab", "cd", "ef", "gh")
    for found, wanted in zip(marked.conversation(messages), plain.conversation(messages), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_template_that_rewrites_history_is_refused_where_it_would_train_on_it() -> None:
    """By message and first token that differs; the last answer alone is honest and stays possible."""
    message = refusal(chat(REWRITES), say("ab", "#t#cd", "ef", "gh"))
    assert "messages[1]: token 6 changes from '#" in message
    assert "later messages are added" in message
    assert "set data.train_on to last" in message
    one = chat(REWRITES, train_on="last")
    assert texts(one, *one.conversation(say("ab", "#t#cd", "ef", "#u#gh")))[1] == "#u#gh<e>"


def test_a_token_across_the_border_of_a_message_is_refused() -> None:
    """Where the tokenizer joins prompt and answer, the prompt sampled from is not the prompt trained on."""
    template = PLAIN.replace("<assistant>{% endif %}", "<assistant>\n{% endif %}").replace(
        "<{{ m.role }}>", "<{{ m.role }}>\n"
    )
    one = chat(template, merges=("\nx",))
    assert "the tokenizer joins the text on both sides" in refusal(one, say("ab", "xy"))
    assert texts(one, *one.conversation(say("ab", "yx")))[1] == "yx<e>"


def test_a_template_that_raises_is_refused_in_its_own_words() -> None:
    """Roles must alternate: the template says so, and the line is named."""
    message = refusal(chat(ALTERNATES), [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    assert "roles must alternate" in message


def test_tools_that_the_template_drops_are_refused() -> None:
    """The same text with and without them means that the model never sees them."""
    assert "tools: the model's chat template drops them" in refusal(chat(), say("ab", "cd"), [{"name": "f"}])
    one = chat(TOOLS)
    whole, _ = texts(one, *one.conversation(say("ab", "cd"), [{"name": "f"}]))
    assert whole.startswith("<system>f;<e><user>ab")
    assert whole == texts(one, *one.conversation(say("ab", "cd"), '[{"name": "f"}]'))[0]


def test_calls_are_trained_and_need_no_content() -> None:
    """An assistant message of calls alone; a template that knows no calls refuses them."""
    calls = {"content": None, "tool_calls": [{"function": {"name": "f"}}]}
    one = chat(TOOLS)
    assert texts(one, *one.conversation(say("ab", "", m1=calls)))[1] == "[f]<e>"
    assert "messages[1].tool_calls: the model's chat template does not use" in refusal(chat(), say("ab", "", m1=calls))


def test_answers_before_and_after_a_tool_are_trained() -> None:
    """What the tool says is not."""
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    messages = [*say("ab"), call, {"role": "tool", "content": "7"}, {"role": "assistant", "content": "cd"}]
    one = chat(TOOLS)
    assert texts(one, *one.conversation(messages))[1] == '[f{"a":1}]<e>cd<e>'


def test_arguments_that_would_be_quoted_twice_are_refused() -> None:
    """A text that is JSON already, in a template that writes JSON; as an object it is written once."""
    call = {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}
    message = refusal(chat(TOOLS), say("ab", "", m1=call))
    assert "messages[1].tool_calls: the arguments are a text" in message
    with pytest.raises(DataError, match="the arguments are a text"):
        chat(TOOLS).pair(say("ab"), say("ab", "", m1=call)[1:])
    one = chat(TOOLS.replace("| tojson", ""))
    assert texts(one, *one.conversation(say("ab", "", m1=call)))[1] == '[f{"a":1}]<e>'


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ("text", "messages: must be a list of at least one message, got 'text' of type str"),
        ([], "messages: must be a list of at least one message"),
        (["a"], "messages[0]: must be an object with the keys role and content"),
        ([{"content": "a"}], "messages[0].role: must be a text such as 'user'"),
        ([{"role": "user"}], "messages[0].content: must be a text, got None"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content: must be a text, got ["),
        ([{"role": "user", "content": "a", "contnet": "b"}], "messages[0].contnet: the model's chat template does not"),
        ([{"role": "user", "content": "a", "train": True}], "messages[0]: only assistant messages can be trained"),
        (say("a", "b", m1={"train": 2}), "messages[1].train: must be true or false, got 2"),
        (say("a", "b", m1={"train": True, "trained": True}), "train and trained mean the same"),
        ([{"role": "assistant", "content": "a"}], "messages[0]: an assistant message needs something before it"),
    ],
)
def test_malformed_messages_are_refused_by_message_and_key(messages: object, expected: str) -> None:
    """Each names the message, the key, the rule and the value."""
    assert expected in refusal(chat(), messages)


@pytest.mark.parametrize("tools", ["{", "{}", {"a": 1}, ["a"]])
def test_malformed_tools_are_refused(tools: object) -> None:
    """A list of objects, or a text that holds one."""
    assert "tools: " in refusal(chat(TOOLS), say("a", "b"), tools)


def test_a_tokenizer_without_a_template_is_a_matter_of_the_model() -> None:
    """Not of one line: the command ends at the first."""
    with pytest.raises(ConfigError, match="has no chat template"):
        chat(None).conversation(say("a", "b"))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """The next step is said."""
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        Renderer.load(str(tmp_path))


def test_texts_are_encoded_each_by_itself() -> None:
    """The prompt is the same prefix for every completion, and the completion ends with the EOS token, once."""
    one = chat()
    for completion in ("cd", "cd<e>"):
        ids, mask = one.pair("ab", completion)
        assert texts(one, ids, mask) == ("abcd<e>", "cd<e>")


def test_a_prompt_of_messages_is_completed_by_one() -> None:
    """The same tokens as the conversation, with the end of the turn as the last that is trained."""
    one = chat()
    messages = say("ab", "cd", "ef", "gh")
    ids, mask = one.pair(messages[:3], messages[3:])
    wanted, _ = one.conversation(messages)
    np.testing.assert_array_equal(ids, wanted)
    assert texts(one, ids, mask)[1] == "gh<e>"


@pytest.mark.parametrize(
    ("prompt", "completion", "tools", "expected"),
    [
        ("a", [], None, "must both be texts or both lists of messages"),
        ("a", "b", [{"name": "f"}], "tools: need a chat template"),
        ("", "b", None, "prompt: must hold at least one token"),
        (say("a"), say("a"), None, "completion: must be one assistant message, got 1 of the roles user"),
        (say("a"), say("a", "b")[1:] * 2, None, "got 2 of the roles assistant, assistant"),
        (say("a"), say("a", "b", m1={"train": False})[1:], None, "completion[0]: is what this line trains"),
        (say("a", "b", "c", m1={"train": True}), say("a", "b")[1:], None, "prompt[1]: nothing of a prompt is trained"),
        (say("a"), say("a", "b")[1:], [{"name": "f"}], "tools: the model's chat template drops them"),
    ],
)
def test_a_wrong_pair_is_refused(prompt: object, completion: object, tools: object, expected: str) -> None:
    """Both sides are of one kind, and what is asked can be honoured."""
    with pytest.raises(DataError) as caught:
        chat().pair(prompt, completion, tools)
    assert expected in str(caught.value)


def test_a_completion_needs_an_end() -> None:
    """A tokenizer without EOS cannot say where a text ends."""
    with pytest.raises(ConfigError, match="EOS"):
        chat(eos=None).pair("a", "b")


@needs_model
def test_the_real_model_s_template() -> None:
    """Default system message, no line break trained, and one more turn continues the same tokens."""
    one = Chat(Renderer.load(str(MODEL)))
    ids, mask = one.conversation(say("Hi", "Hello there"))
    assert one.decode(ids[mask].tolist()) == "Hello there<|im_end|>"
    assert one.decode(ids.tolist()).startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    longer, _ = one.conversation(say("Hi", "Hello there", "More", "No"))
    np.testing.assert_array_equal(longer[: len(ids)], ids)


@needs_model
def test_a_thousand_lines_of_conversations_take_seconds() -> None:
    """Turns already seen are not encoded again: 100 conversations of 10 lines each, well under a minute."""
    one = Chat(Renderer.load(str(MODEL)))
    begin, lines = time.process_time(), 0
    for number in range(100):
        contents = [f"turn {turn} of conversation {number}: " + "some words of text " * 5 for turn in range(20)]
        for stop in range(2, 22, 2):
            one.conversation(say(*contents[:stop]))
            lines += 1
    assert lines == 1000
    assert time.process_time() - begin < 60
