"""Pricers that are wrong on purpose, one idea each, for the tests that must catch them."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor
from typing import Any

from trainer_rank.memory import ForwardShape, LowerBound, Price, Profile, Term, combine
from trainer_rank.memory.profile import SAFETY, WINDOW, ProfileModel, price_forward
from trainer_rank.requests import Request
from trainer_rank.session.pricing import Forward
from trainer_rank.session.profile_pricing import ProfilePricing


def capped_price(model: ProfileModel, shape: ForwardShape, known: Profile | None) -> Price:
    """The learned rate ends at 8 times the rows observed, and the layout's own sharing scales what is left.

    At a fixed sharing ratio it never falls, so a sweep over sizes finds nothing. At fixed tokens it falls as rows grow.
    """
    static = shape.packed_rows * model.static_bytes_per_row
    learned = 0
    if known is not None and shape.packed_rows:
        rows = min(shape.packed_rows, WINDOW * known.packed_rows)
        ratio = shape.logical_tokens / known.ratio / shape.packed_rows
        learned = floor(known.peak_rate * rows * max(1, ratio))
    required = floor(SAFETY * (shape.output_bytes + max(static, learned)))
    term = Term(name="capped", num_bytes=required)
    return Price(required_bytes=required, retained_bytes=required, terms=(term,), phase="whole pass")


class CappedPricing(ProfilePricing):
    """Prices by ``capped_price``, and takes the price of full sharing for a bound on all layouts."""

    def price(self, forwards: Sequence[Forward]) -> Price:
        return combine([self._capped(*self._read(forward)) for forward in forwards])

    def at_least(self, forwards: Sequence[Sequence[Request]]) -> LowerBound | None:
        shared = [self._capped(*self._read_shared(requests)) for requests in forwards]
        return LowerBound(combine(shared).required_bytes)

    def _capped(self, signature: Any, shape: ForwardShape) -> Price:
        return capped_price(self._model, shape, self._book.find(signature))


class RetainedPricing(ProfilePricing):
    """Prices as the library does, and takes the retained price of full sharing for a bound on retained prices."""

    def at_least(self, forwards: Sequence[Sequence[Request]]) -> LowerBound | None:
        prices = []
        for requests in forwards:
            signature, shape = self._read_shared(requests)
            prices.append(price_forward(self._model, shape, self._book.find(signature)))
        return LowerBound(combine(prices).required_bytes)
