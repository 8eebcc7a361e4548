"""Which changes are offered when a step does not fit, and in which order. Plans are faked: memory by formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from trainer_rank.meters.devices import Device
from trainer_rank.planning.fixes import find_fixes
from trainer_rank.planning.options import Options
from trainer_rank.planning.report import PassReport, PlanReport
from trainer_rank.units import GIB

SMALL = Device(name="small", usable_bytes=10 * GIB, multiprocessors=8)

Needs = Callable[[Options, int], int]
"""GiB that options take for a request of so many tokens."""


def plan(options: Options, device: Device, needs: Needs, tokens: int) -> PlanReport:
    """A plan of one request of so many tokens."""
    needed = needs(options, tokens) * GIB
    one = PassReport(
        requests=1, packed_rows=tokens, logical_tokens=tokens, head_rows=tokens, segments=1, required_bytes=needed,
        retained_bytes=0, phase="head", layer=None, terms={"head": needed},
    )  # fmt: skip
    short = max(0, needed - device.usable_bytes)
    return PlanReport(
        model="m", device=device.name, options=asdict(options), fits=not short, capacity_bytes=device.usable_bytes,
        resident={}, reserve_bytes=0, pending={}, passes=() if short else (one,), worst=one,
        refusal="too long" if short else None, short_bytes=short, peak_bytes=needed,
    )  # fmt: skip


def fixes(options: Options, needs: Needs, *, tokens: int = 1000) -> tuple[list[str], list[Options]]:
    """Return the changes found and all options that were planned."""
    asked = []

    def again(changed: Options, device: Device) -> PlanReport:
        asked.append(changed)
        return plan(changed, device, needs, tokens)

    def shortened(changed: Options, longest: int) -> tuple[str, PlanReport] | None:
        return f"to {longest} tokens", plan(changed, SMALL, needs, longest)

    refused = plan(options, SMALL, needs, tokens)
    assert not refused.fits
    return [fix.change for fix in find_fixes(options, SMALL, refused, again, shortened)], asked


def test_several_changes_at_once_are_tried_only_when_none_does_it_alone() -> None:
    """Recompute alone does; the chunk of the head alone does not."""
    found, asked = fixes(
        Options(model="m", recompute="none"), lambda options, tokens: 9 if options.recompute == "full" else 30
    )
    assert found == ["recompute: none -> full", "device: small -> RTX 5090"]
    assert not any(one.recompute == "full" and one.head_chunk_rows < 512 for one in asked)


def test_changes_that_only_do_it_together_are_all_named() -> None:
    """Neither alone."""

    def needs(options: Options, tokens: int) -> int:
        return 30 - 12 * (options.recompute == "full") - 12 * (options.head_chunk_rows < 512)

    found, _ = fixes(Options(model="m", recompute="none"), needs)
    assert found[0] == "chunk the head: 512 -> 128 rows and recompute: none -> full"


def test_adapters_are_planned_as_they_are_offered() -> None:
    """By themselves, not with other changes that go unsaid."""
    found, asked = fixes(Options(model="m", lora_rank=None), lambda options, _: 9 if options.lora_rank else 30)
    assert found[0] == "train adapters of rank 16 instead of all weights"
    assert Options(model="m", lora_rank=16) in asked

    def with_chunks(options: Options, tokens: int) -> int:
        return 30 - 12 * (options.lora_rank is not None) - 12 * (options.head_chunk_rows < 512)

    found, _ = fixes(Options(model="m", lora_rank=None), with_chunks)
    assert found[0] == "train adapters of rank 16 instead of all weights and chunk the head: 512 -> 128 rows"


def test_what_a_change_can_do_without_is_left_out_of_it() -> None:
    """Adapters and recompute do it; the chunk of the head has no part in it."""

    def needs(options: Options, tokens: int) -> int:
        return 30 - 12 * (options.recompute == "full") - 12 * (options.lora_rank is not None)

    found, _ = fixes(Options(model="m", lora_rank=None, recompute="none"), needs)
    assert found[0] == "train adapters of rank 16 instead of all weights and recompute: none -> full"


def test_requests_are_shortened_when_no_option_helps_and_less_with_better_options() -> None:
    """Both ways are offered where the options allow much longer requests; the longer first."""

    def needs(options: Options, tokens: int) -> int:
        return -(-tokens // 20) if options.recompute == "none" else -(-tokens // 60)

    found, _ = fixes(Options(model="m", recompute="none", head_chunk_rows=64), needs)
    assert found == ["recompute: none -> full and to 588 tokens", "to 200 tokens", "device: small -> H100"]


def test_a_shorter_length_stands_alone_when_other_options_hardly_help() -> None:
    """A smaller chunk of the head would allow one token in a hundred more."""

    def needs(options: Options, tokens: int) -> int:
        return -(-tokens // 20) - (options.head_chunk_rows < 512)

    found, _ = fixes(Options(model="m"), needs)
    assert found[0] == "to 200 tokens"
    assert not any("chunk" in change for change in found)


def test_nothing_is_offered_where_nothing_helps() -> None:
    """No device of the table has a petabyte."""
    assert fixes(Options(model="m", head_chunk_rows=64), lambda *_: 10**6)[0] == []
