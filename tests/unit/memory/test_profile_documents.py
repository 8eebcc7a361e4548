"""The published arithmetic of packed pricing, derived again; what was measured or reported stands beside, not derived.

Observations of a 35B hybrid (Qwen3.6-35B-A3B), in decimal KB and binary GiB as published:

* First shared batch of a production run: 6.9 GiB observed, 56.3 GiB predicted by logical tokens, 66.5 GiB required with
  67.7 GiB available. Over the run peaks fit 66.6 MiB + 459,782 bytes per packed row.
* Controlled, 8 layers, sharing ratio 8: 4.9 GiB observed; 321.9 KB per row at ratio 1, 323.5 KB at ratio 8.
* 101 branches of 20 tokens on a prompt of 5,100: 2.5 GiB observed; 323 KB per row alone, 378 KB in the tree, which is
  about 3.9 MB per further segment.
* 4,616 bytes per duplicate one-token request at the end of the head's forward, 3,080 of them live into backward.
"""

from __future__ import annotations

from fractions import Fraction
from math import floor

from trainer_rank.memory.profile import LOGICAL_CHARGE, ForwardShape, Profile, ProfileModel, price_forward
from trainer_rank.units import GIB, MIB

STATE = 4_292_608
MODEL = ProfileModel(
    num_layers=40, hidden_size=2048, vocabulary_size=248_320, element_size=2, state_bytes=STATE
)  # fmt: skip


def gib(
    rate: int, rows: int, tokens: int, *, ratio: Fraction | int = 1, segments: int = 0, packed: bool = True
) -> float:
    known = Profile(peak_rate=Fraction(rate), retained_rate=None, packed_rows=rows, ratio=Fraction(ratio))
    shape = ForwardShape(
        packed_rows=rows, logical_tokens=tokens, output_bytes=4 * tokens, segments=segments, packed=packed
    )
    return round(price_forward(MODEL, shape, known).required_bytes / GIB, 1)


def test_the_first_shared_batch() -> None:
    """8.3 GiB right after a calibration without sharing: the clamp is inactive at ratio 6.7."""
    assert gib(459_782, 16_205, 109_065) == 8.3
    assert gib(459_782, 16_205, 109_065, ratio=7) == 8.3
    assert round(LOGICAL_CHARGE * 109_065 / MIB) == 639
    assert round(109_065 / 16_205, 1) == 6.7


def test_controlled_ratio_eight() -> None:
    assert gib(323_500, 16_384, 131_072) == 6.3
    assert round(100 * LOGICAL_CHARGE * 131_072 / (323_500 * 16_384)) == 15


def test_many_branches_before_and_after_their_ratio_is_learned() -> None:
    """5,100 shared tokens and 101 branches of 20: 7,120 rows for 517,120 tokens."""
    rows, tokens = 5100 + 101 * 20, 101 * 5120
    assert (rows, tokens) == (7120, 517_120)
    assert round(tokens / rows, 1) == 72.6
    assert gib(323_000, rows, tokens, segments=101) == 25.1
    assert gib(323_000, rows, tokens, ratio=Fraction(tokens, rows), segments=101) == 6.1
    assert gib(323_000, rows, tokens, packed=False) == 171.1


def test_the_charge_is_twelve_blocks() -> None:
    """More than the nine blocks and 8 bytes measured at the head, and 384 KiB at 64 tokens."""
    assert LOGICAL_CHARGE == 12 * 512
    assert floor(LOGICAL_CHARGE * 64 / 1024) == 384
    assert 4616 == 9 * 512 + 8
    assert LOGICAL_CHARGE > 4616
