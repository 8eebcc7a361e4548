"""Chat text as prefix trees, for checks with a real model and its tokenizer."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]
Turn = tuple[str, str]

SYSTEM = (
    "You are the assistant of a small public library. Answer in plain words and keep to what you know: opening hours "
    "are 9:00 to 18:00 on weekdays and 10:00 to 14:00 on Saturdays; books are lent for four weeks and may be renewed "
    "twice; a late book costs 0.20 per day, at most 6.00. When you do not know, say so and name the front desk."
)
QUESTION = "I borrowed two novels five weeks ago and forgot about them. What do I owe, and can I still renew them?"
ANSWERS = (
    "They were due a week ago, so each costs 7 x 0.20 = 1.40, together 2.80. You can renew a late book once the fee is "
    "paid.",
    "You owe 2.80. Renewal is possible twice.",
    "Five weeks is one week more than the loan period of four weeks. That makes seven days at 0.20 for each of the two "
    "books: 2.80 in all. Please pay at the front desk; after that both can be renewed for another four weeks.",
    "I am not sure whether a late book can be renewed. Please ask at the front desk.",
    "```python\ndays, books = 7, 2\nprint(f'{days * books * 0.20:.2f}')  # 2.80\n```",
    "2.80.",
    "Sorry to hear that! No worries, it happens to all of us. The fee is 1.40 per novel.",
)
CONVERSATION: tuple[Turn, ...] = (
    (QUESTION, ANSWERS[0]),
    ("Can I pay by card?", "I do not know which cards are taken; the front desk does."),
    ("And on Saturday, until when?", "Until 14:00; the doors open at 10:00."),
    ("Thanks. Do you have a reading group for children?", "Please ask at the front desk, I have no list of groups."),
)
OTHER: tuple[Turn, ...] = (
    ("Wie lange darf ich ein Buch behalten?", "Vier Wochen, und Sie können zweimal verlängern."),
    ("Und was kostet es danach?", "0,20 pro Tag und Buch, höchstens 6,00."),
)
EXAMPLES = "".join(
    f"Text: {text}\nMood: {mood}\n\n"
    for text, mood in (
        ("The librarian stayed ten minutes longer so that I could finish the chapter.", "grateful"),
        ("Third time this month that the printer is out of order.", "annoyed"),
        ("I had expected a dusty room and found a bright hall full of plants.", "surprised"),
        ("The reading is on Thursday at seven.", "neutral"),
    )
)
TEXTS = (
    "They closed early without a sign on the door.",
    "My daughter now wants to go every day!",
    "The book is on shelf 12.",
    "They closed early, but the lady let me in anyway.",
)


def chat_trees(tokenizer: Any) -> dict[str, list[Tokens]]:
    """Return named trees of token rows, a few hundred tokens each."""

    def conversation(turns: tuple[Turn, ...], *, system: str = SYSTEM, closed: bool = True) -> Tokens:
        messages = [{"role": "system", "content": system}]
        for question, answer in turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        if not closed:
            messages.pop()
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=not closed)
        return plain(text)

    def plain(text: str) -> Tokens:
        return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)

    answers = [conversation(((QUESTION, answer),)) for answer in ANSWERS]
    turns = [conversation(CONVERSATION[: count + 1]) for count in range(len(CONVERSATION))]
    others = [conversation(OTHER[: count + 1]) for count in range(len(OTHER))]
    empty = conversation(((QUESTION, ""),), closed=False)
    return {
        "answers to one question": answers,
        "one request per turn": turns,
        "duplicates, no answer": [answers[0], empty, answers[2], answers[0]],
        "few-shot examples": [plain(f"{EXAMPLES}Text: {text}\nMood:") for text in TEXTS],
        "two conversations": [*turns[:2], *others, *answers[3:6]],
        "nothing in common": [plain(f"{number}: {text}") for number, text in enumerate(TEXTS)],
    }
