"""Decision records go to JSON and back, and add up."""

from __future__ import annotations

import json

import pytest

from trainer_rank.admission import Admission, Budget, admit
from trainer_rank.memory import ModelFacts, Observation, Price, Term
from trainer_rank.planner import PassWork, pass_work
from trainer_rank.prefix import Layout
from trainer_rank.report import AdmissionRecord, ObservationRecord, admission_record, observation_record
from trainer_rank.requests import Request

FACTS = ModelFacts(
    family="llama", num_layers=2, hidden_size=8, num_heads=2, num_key_value_heads=1, head_size=4, vocabulary_size=32,
    max_positions=64, dtype="float32", weight_bytes=1000, trainable_bytes=100, num_trainable=4,
    largest_trainable_bytes=40, adapter="default",
)  # fmt: skip


def works() -> list[PassWork]:
    """Return a graded and an ungraded pass."""
    graded = [Request.next_token([1, 2, 3]), Request.next_token([1, 2, 4])]
    silent = [Request.next_token([5, 6], no_grad=True)]
    return [pass_work(graded, [0, 3], Layout.full_sharing()), pass_work(silent, [1])]


def verdict(available_bytes: int) -> Admission:
    """Return the admission of 30 bytes, 5 of them of a name that comes twice, and 7 pending."""
    terms = (Term(name="kept", num_bytes=20), Term(name="twice", num_bytes=4), Term(name="twice", num_bytes=6))
    price = Price(required_bytes=30, retained_bytes=20, terms=terms, phase="backward", layer=1)
    budget = Budget(budget_bytes=500, resident_bytes=400, available_bytes=available_bytes)
    return admit(price, budget, (Term(name="optimizer state to come", num_bytes=7),))


def admission(available_bytes: int = 100) -> AdmissionRecord:
    """Return the record of an admission."""
    return admission_record(
        9, works(), verdict(available_bytes), recompute="full", facts=FACTS, pricing={"name": "envelope"}
    )


OBSERVATION = Observation(
    packed_rows=6,
    logical_tokens=8,
    head_rows=4,
    num_segments=4,
    num_requests=3,
    peak_bytes=25,
    peak_resident_bytes=None,
)


def test_terms_sum_to_the_charged_bytes() -> None:
    """Terms of one name are joined, none is lost."""
    record = admission()
    assert record.terms == {"kept": 20, "twice": 10, "optimizer state to come": 7}
    assert sum(record.terms.values()) == record.charged_bytes == record.required_bytes + 7


@pytest.mark.parametrize(("available_bytes", "wanted"), [(37, "admitted"), (36, "refused")])
def test_the_verdict_is_the_admission_s(available_bytes: int, wanted: str) -> None:
    """To the byte."""
    assert admission(available_bytes).verdict == wanted


def test_an_admission_goes_to_json_and_back_unchanged() -> None:
    """Plain values only: what is read is what was written, and rebuilds the record."""
    record = admission()
    line = json.loads(json.dumps(record.as_line(), allow_nan=False))
    assert line == record.as_line()
    assert (line.pop("schema"), line.pop("kind")) == (1, "admission")
    assert AdmissionRecord(**line) == record


def test_an_observation_goes_to_json_and_back_unchanged() -> None:
    """It is joined to its decision by number."""
    record = observation_record(9, OBSERVATION, predicted_bytes=30, seconds=0.5)
    line = json.loads(json.dumps(record.as_line(), allow_nan=False))
    assert (line.pop("schema"), line.pop("kind")) == (1, "observation")
    assert ObservationRecord(**line) == record
    assert (record.decision, record.predicted_over_observed) == (9, 30 / 25)


def test_nothing_allocated_makes_no_ratio() -> None:
    """A ratio to zero would not be JSON."""
    empty = Observation(
        packed_rows=0, logical_tokens=0, head_rows=0, num_segments=0, num_requests=1, peak_bytes=0,
        peak_resident_bytes=None,
    )  # fmt: skip
    assert observation_record(1, empty, predicted_bytes=0, seconds=0.0).predicted_over_observed is None


def test_each_pass_is_described_by_its_features() -> None:
    """Rows, tokens, head rows, labels and grad mode of every pass, and the flat indices of all requests."""
    record = admission()
    assert record.requests == [0, 1, 3]
    assert [(one["packed_rows"], one["logical_tokens"], one["no_grad"]) for one in record.passes] == [
        (4, 6, False),
        (2, 2, True),
    ]
    assert record.passes[0]["labels"] == 4
    assert record.facts["adapter"] == "default"


def test_no_token_is_written() -> None:
    """Decision records carry shapes, never the text."""
    requests = [Request.next_token([987654, 876543, 765432])]
    record = admission_record(
        1, [pass_work(requests, [0])], verdict(100), recompute="full", facts=FACTS, pricing={"name": "envelope"}
    )
    text = json.dumps(record.as_line())
    assert not any(token in text for token in ("987654", "876543", "765432"))
