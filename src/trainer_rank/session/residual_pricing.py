"""The envelope's prices with what observations add to them (``memory.residual``).

Only a forward of a single pass teaches: of several that are alive together, no one's share is known. What was observed
takes effect when the next call begins, so that prices within a call agree.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainer_rank.memory import MemorySignature, ModelFacts, Observation, Price, ResidualBook, Seen, Term
from trainer_rank.memory.signature import request_key
from trainer_rank.planner import PassWork
from trainer_rank.session.pricing import Forward, PassByPass

LEARNED = "learned"
"""Name of the term, and of what a checkpoint keeps."""


class ResidualPricing(PassByPass):
    """The ``envelope`` pricer of one live model.

    Args:
        price: Price of one pass with nothing learned.
        facts: The model.
        surroundings: What else must agree for passes to be compared, read at every pricing: the recompute in force,
            the head's chunks, what the caller declared.
    """

    def __init__(
        self,
        price: Callable[[PassWork], Price],
        facts: ModelFacts,
        surroundings: Callable[[], Mapping[str, Any]],
    ) -> None:
        super().__init__(self._with_learned, facts)
        self._bare = price
        self._surroundings = surroundings
        self._book = ResidualBook()
        self._staged: list[tuple[str, Seen]] = []
        self._news: dict[str, list[Seen]] = {}

    @property
    def book(self) -> ResidualBook:
        """What counts in prices now."""
        return self._book

    def begin(self) -> None:
        by_signature: dict[str, list[Seen]] = {}
        for signature, seen in self._staged:
            by_signature.setdefault(signature, []).append(seen)
        self._staged = []
        for signature, several in by_signature.items():
            self._book.observe(signature, several)
            self._news.setdefault(signature, []).extend(several)

    def observe(self, forwards: Sequence[Forward], observation: Observation) -> None:
        if len(forwards) != 1 or len(forwards[0].works) != 1:
            return
        (work,) = forwards[0].works
        # Without its backward a pass needs less than it was priced for, and shows nothing.
        if not work.no_grad and observation.caller_bytes is None:
            return
        seen = Seen(
            packed_rows=work.batch.packed_rows,
            logical_tokens=work.batch.logical_tokens,
            predicted_bytes=self._bare(work).required_bytes,
            peak_bytes=observation.peak_bytes,
        )
        self._staged.append((self._signature(work), seen))

    def learned(self) -> dict[str, Any]:
        self.begin()
        return {"name": "envelope", LEARNED: self._book.to_json()}

    def load_learned(self, values: Mapping[str, Any]) -> None:
        if values["name"] == "envelope":
            self._staged, self._news = [], {}
            self._book = ResidualBook.from_json(values.get(LEARNED, {}))

    def load_stored(self, values: Mapping[str, Any]) -> None:
        self._book = ResidualBook.from_json(values)

    def news(self) -> dict[str, Any]:
        found = {signature: [one.values for one in seen] for signature, seen in self._news.items()}
        self._news = {}
        return found

    def facts(self, forwards: Sequence[Forward]) -> dict[str, Any]:
        works = [work for forward in forwards for work in forward.works]
        return {"name": "envelope", LEARNED: [self._used(work) for work in works]}

    def _with_learned(self, work: PassWork) -> Price:
        price = self._bare(work)
        extra = self._extra(work, price)
        if not extra:
            return price
        terms = (*price.terms, Term(name=LEARNED, num_bytes=extra))
        return replace(price, required_bytes=price.required_bytes + extra, terms=terms)

    def _used(self, work: PassWork) -> dict[str, Any] | None:
        """Return what the learned part of a price is made of, as plain values; None when nothing is known."""
        signature = self._signature(work)
        known = self._book.find(signature)
        if known is None or not known.is_short:
            return None
        price = self._bare(work)
        size = (work.batch.packed_rows, work.batch.logical_tokens, price.required_bytes)
        return {
            "signature": json.loads(signature),
            "traced_bytes": price.required_bytes,
            "extra_bytes": known.extra_bytes(*size),
            "intercept": known.intercept,
            "per_row": known.per_row,
            "per_token": known.per_token,
            "margin": known.margin,
            "fewest_rows": known.smallest[0],
            "fewest_tokens": known.smallest[1],
            "enough_bytes": known.enough_bytes(*size),
        }

    def _extra(self, work: PassWork, price: Price) -> int:
        known = self._book.find(self._signature(work)) if len(self._book) else None
        if known is None:
            return 0
        return known.extra_bytes(work.batch.packed_rows, work.batch.logical_tokens, price.required_bytes)

    def _signature(self, work: PassWork) -> str:
        """Return everything that must agree for the residuals of two passes to be compared, as one text."""
        mix = MemorySignature.of(
            ((key, 0) for key in _request_keys(work)),
            grad_modes=[not work.no_grad],
            adapters=[work.adapter or ""],
            recompute="",
        )
        entries = {**mix.to_json(), **self._surroundings(), "recomputed": work.recomputed}
        return json.dumps(entries, sort_keys=True)


def _request_keys(work: PassWork) -> set[str]:
    """Return what the requests of a pass ask for."""
    head, several = work.head, len(work.indices)
    top = head.top.shapes or ((0, 0),) * several
    logits, hidden = work.logits.sizes or (0,) * several, work.hidden.sizes or (0,) * several
    return {
        request_key(
            None if shape == (0,) else shape,
            top_k=k or None,
            logits=bool(num_logits),
            hidden_states=bool(num_hidden),
        )
        for shape, (_, k), num_logits, num_hidden in zip(head.shapes, top, logits, hidden, strict=True)
    }
