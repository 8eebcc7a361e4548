"""Price against budget. No I/O, no clock, no torch: the same inputs always give the same verdict."""

from __future__ import annotations

from dataclasses import dataclass

from trainer_rank.memory import Price, Term
from trainer_rank.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What the device could give at one moment, as read from a meter.

    Attributes:
        budget_bytes: All bytes this process may hold on the device.
        resident_bytes: What it held when the budget was read.
        available_bytes: What a pass may take: physically free within the budget, less the reserve.
    """

    budget_bytes: int
    resident_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A verdict and everything it was made of.

    ``pending`` are bytes that are not part of the pass but will exist beside its successors: optimizer state and
    parameter gradients not yet allocated. They are charged from the first admission on, so that the second step needs
    no more than the first.
    """

    price: Price
    budget: Budget
    pending: tuple[Term, ...] = ()

    @property
    def charged_bytes(self) -> int:
        """Bytes held against the budget: the price and what is pending."""
        return self.price.required_bytes + sum(term.num_bytes for term in self.pending)

    @property
    def admitted(self) -> bool:
        """Whether the pass may run."""
        return self.charged_bytes <= self.budget.available_bytes

    @property
    def short_bytes(self) -> int:
        """Bytes missing; 0 when admitted. What is resident beyond the budget is missing too."""
        if self.admitted:
            return 0
        over_bytes = max(0, self.budget.resident_bytes - self.budget.budget_bytes)
        return self.charged_bytes - self.budget.available_bytes + over_bytes

    @property
    def predicted_peak_bytes(self) -> int:
        """Everything on the device at the pass's peak: resident plus required."""
        return self.budget.resident_bytes + self.price.required_bytes

    @property
    def terms(self) -> tuple[Term, ...]:
        """All terms charged."""
        return (*self.price.terms, *self.pending)

    @property
    def largest_term(self) -> Term:
        """The term with the most bytes."""
        return max(self.terms, key=lambda term: term.num_bytes)

    def explain(self) -> str:
        """Return the sum in words: each term, the total, what is available and how that arose."""
        shares = ", ".join(f"{term.name} {format_bytes(term.num_bytes)}" for term in self.terms if term.num_bytes)
        return (
            f"needs {format_bytes(self.charged_bytes)} ({shares}; peak in {self.price.phase}), "
            f"{format_bytes(self.budget.available_bytes)} available of a {format_bytes(self.budget.budget_bytes)} "
            f"budget with {format_bytes(self.budget.resident_bytes)} resident"
        )


def admit(price: Price, budget: Budget, pending: tuple[Term, ...] = ()) -> Admission:
    """Return the admission record of a price under a budget."""
    return Admission(price=price, budget=budget, pending=pending)
