"""Data sets: what holds for every step, in whatever order groups are drawn."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.builders import completion, config_folder, tokens
from trainer_rank.cli.plan_display import print_text
from trainer_rank.errors import ConfigError
from trainer_rank.executor.envelope_pricer import EnvelopePricer
from trainer_rank.executor.envelope_store import EnvelopeStore, default_folder
from trainer_rank.meters.devices import Device
from trainer_rank.meters.waste import CUT_SEGMENTS, SEGMENTS_BYTES
from trainer_rank.planner import pass_work
from trainer_rank.planning.bound import GroupSize, at_most
from trainer_rank.planning.data_set import DataSet
from trainer_rank.planning.options import Options, make_runtime
from trainer_rank.planning.plan import make_data_set_plan, make_plan
from trainer_rank.prefix import Layout
from trainer_rank.requests import Request
from trainer_rank.units import GIB, MIB

CHUNK = 16


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    """Options for a small model, of which there is a configuration only."""
    model = config_folder(tmp_path_factory.mktemp("model"), max_position_embeddings=20_000)
    return Options(model=model, lora_rank=2, head_chunk_rows=CHUNK)


def gpu(capacity: int) -> Device:
    return Device(name="test", usable_bytes=capacity, multiprocessors=132, context_bytes=MIB, cublas_bytes=0)


def random_groups(seed: int, count: int = 5) -> list[list[Request]]:
    """Groups of one to four requests with prompts of their own, some of them short, nested or repeated."""
    draw = np.random.default_rng(seed)
    groups = []
    for group in range(count):
        prompt = tokens(100 * seed + group, int(draw.integers(1, 90)))
        made = [
            completion(prompt[: int(draw.integers(1, prompt.size + 1))], tokens(number, int(draw.integers(1, 150))))
            for number in range(int(draw.integers(1, 5)))
        ]
        groups.append([*made, *made[: int(draw.integers(0, 2))]])
    return groups


def subsets(step: Sequence[Request]) -> list[list[Request]]:
    """Contiguous runs of a step: what a split may make of it, and more."""
    return [list(step[first:last]) for first in range(len(step)) for last in range(first + 1, len(step) + 1)]


@pytest.mark.parametrize(("seed", "in_step"), [(0, 1), (1, 2), (2, 3)])
def test_no_pass_of_any_order_and_split_exceeds_the_bound(options: Options, seed: int, in_step: int) -> None:
    """All combinations of groups, all contiguous parts of each step, shared as chosen and in full."""
    runtime = make_runtime(options)
    pricer = EnvelopePricer(
        runtime, head_chunk_rows=CHUNK, caller_bytes_per_token=256, store=EnvelopeStore(default_folder())
    )
    envelope = pricer.envelope()
    assert envelope is not None
    groups = random_groups(seed)
    bound = at_most(
        envelope, runtime, [GroupSize.of(group) for group in groups], groups_per_step=in_step, repeats=False,
        head_chunk_rows=CHUNK,
    ).num_bytes  # fmt: skip
    worst = 0
    for chosen in itertools.combinations(groups, in_step):
        for part in subsets([request for group in chosen for request in group]):
            for layout in (None, Layout.full_sharing()):
                work = pass_work(part, range(len(part)), layout)
                worst = max(worst, pricer.price(work).required_bytes)
    assert worst <= bound
    # Of little use if far off: padding, branch points and splits of the keys are what it gives away.
    assert bound <= 4 * worst


def test_the_bound_covers_a_group_that_comes_twice_in_a_step(options: Options) -> None:
    """As in a step that spans two epochs."""
    runtime = make_runtime(options)
    pricer = EnvelopePricer(
        runtime, head_chunk_rows=CHUNK, caller_bytes_per_token=256, store=EnvelopeStore(default_folder())
    )
    envelope = pricer.envelope()
    assert envelope is not None
    groups = random_groups(7, count=3)
    bound = at_most(
        envelope, runtime, [GroupSize.of(group) for group in groups], groups_per_step=2, repeats=True,
        head_chunk_rows=CHUNK,
    ).num_bytes  # fmt: skip
    for pair in itertools.combinations_with_replacement(groups, 2):
        part = [request for group in pair for request in group]
        assert pricer.price(pass_work(part, range(len(part)))).required_bytes <= bound


def test_a_data_set_that_fits_says_what_no_step_exceeds(options: Options) -> None:
    """The heaviest step is a real one and stays below the limit of all."""
    data = DataSet(groups=random_groups(3), groups_per_step=2)
    report = make_data_set_plan(options, gpu(GIB), data)
    assert report.fits
    assert report.data_set is not None
    assert report.data_set.worst_by == "sizes"
    assert report.peak_bytes <= report.data_set.worst_bytes <= report.capacity_bytes
    assert len(report.data_set.heaviest_step) == 2
    assert report.data_set.refused == ()


def test_one_long_request_in_a_light_group_is_found_before_step_1(options: Options) -> None:
    """The heaviest step fits; the request that does not stands in a group nobody would look at."""
    groups = [[completion(tokens(1, 40), tokens(n, 60)) for n in range(6)] for _ in range(4)]
    fits = make_data_set_plan(options, gpu(GIB), DataSet(groups=groups, groups_per_step=1))
    long = completion(tokens(9, 10), tokens(10, 12_000))
    alone = make_plan(options, gpu(GIB), lambda _: [long])
    assert fits.peak_bytes < alone.peak_bytes
    data = DataSet(groups=[*groups, [long]], groups_per_step=1)
    report = make_data_set_plan(options, gpu(alone.peak_bytes * 9 // 10), data)
    assert not report.fits
    assert report.data_set is not None
    (refused,) = report.data_set.refused
    assert (refused.request, refused.tokens) == (24, 12_010)
    assert refused.short_bytes > 0
    by_kind = [fix.change for fix in report.fixes]
    assert any(change.startswith("leave out the 1 request of more than") for change in by_kind)


def test_a_request_that_only_fits_alone_in_its_step_does_not_pass_for_one_that_fits(options: Options) -> None:
    """Beside another pass its step also holds that one's gradients."""
    long = completion(tokens(9, 10), tokens(10, 3000))
    room = make_plan(options, gpu(GIB), lambda _: [long])
    gradients = make_runtime(options).facts.trainable_bytes
    resident = sum(room.resident.values())
    needed = room.peak_bytes - resident + gradients // 2
    exact = int((resident + needed * (1 + CUT_SEGMENTS) + SEGMENTS_BYTES) / 0.99) + 2
    assert make_plan(options, gpu(exact), lambda _: [long]).fits
    report = make_data_set_plan(options, gpu(exact), DataSet(groups=[[long], [long]], groups_per_step=2))
    assert not report.fits
    assert report.refusal is not None
    assert "beside" in report.refusal
    assert 0 < report.short_bytes <= gradients


def test_weights_that_do_not_fit_are_refused_without_a_word_about_requests(options: Options) -> None:
    """Nothing was priced, so nothing is said to fit alone."""
    data = DataSet(groups=random_groups(3), groups_per_step=2)
    report = make_data_set_plan(options, gpu(MIB + 1000), data, with_fixes=False, with_details=True)
    assert not report.fits
    assert report.refusal == "the weights alone do not fit"
    out = io.StringIO()
    print_text(report, all_passes=False, console=Console(file=out, width=100))
    assert "fits alone" not in out.getvalue()


def test_a_data_set_in_which_nothing_is_trained_fits(options: Options) -> None:
    """Its model never runs."""
    data = DataSet(groups=[[Request.next_token(range(9), trained=[0] * 9)]], groups_per_step=4)
    report = make_data_set_plan(options, gpu(GIB), data, with_details=True)
    assert report.fits
    assert report.worst is not None
    assert report.worst.packed_rows == 0
    assert report.timeline == ()


@pytest.mark.parametrize(
    ("groups", "in_step", "message"),
    [([], 1, "at least one group"), ([[]], 1, "no group may be empty"), ([[1]], 0, "groups-per-step must be at least")],
)
def test_a_data_set_without_steps_is_refused(groups: list[list[Request]], in_step: int, message: str) -> None:
    """By field, rule and value."""
    with pytest.raises(ConfigError, match=message):
        DataSet(groups=groups, groups_per_step=in_step)


def test_parquet_files_hold_rollouts(tmp_path: Path) -> None:
    """The same rules as for lines of JSON; without a mask every token is trained."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    from trainer_rank.errors import DataError
    from trainer_rank.training.data_files import read_data

    path = tmp_path / "data.parquet"
    table = {"tokens": [[1, 2, 3], [4, 5]], "trained": [[False, True, True], None]}
    parquet.write_table(arrow.table(table), path)
    first, second = read_data(path)
    assert (first.tokens.tolist(), first.trained.tolist()) == ([1, 2, 3], [False, True, True])
    assert (second.tokens.tolist(), second.trained.tolist()) == ([4, 5], [True, True])
    parquet.write_table(arrow.table({"tokens": [[1, -2]]}), path)
    with pytest.raises(DataError, match=r"data.parquet:1: tokens\[1\]"):
        read_data(path)
    parquet.write_table(arrow.table({"ids": [[1]]}), path)
    with pytest.raises(DataError, match=r"must have a column 'tokens', or .* got the columns ids"):
        read_data(path)
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match="not a Parquet file"):
        read_data(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_data(tmp_path / "none.parquet")
