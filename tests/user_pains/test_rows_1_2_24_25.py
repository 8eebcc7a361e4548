"""Four public reports in full: a cap that was none, a small model, a mask, and a long sample that came late."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tests.builders import completion, config_folder
from trainer_rank.admission import Budget
from trainer_rank.cli.main import FAILED, SUCCESS, run
from trainer_rank.memory import ModelFacts, Price, Term
from trainer_rank.meters.devices import Device, find_device
from trainer_rank.meters.waste import SEGMENTS_BYTES
from trainer_rank.planner.fit import Fill, FittedPasses, fit_passes
from trainer_rank.planning.data_set import DataSet
from trainer_rank.planning.options import Options
from trainer_rank.planning.plan import make_data_set_plan, make_plan
from trainer_rank.planning.shape import Shape
from trainer_rank.requests import flatten
from trainer_rank.session.candidates import Candidates
from trainer_rank.session.pricing import PassByPass
from trainer_rank.session.units import plan_order
from trainer_rank.units import GIB

CAP = 921


def keeps_to_the_cap(group: Candidates) -> Fill:
    """Memory that never runs out."""
    return lambda units: 0.0 if group.within_cap(tuple(units)) else math.inf


FACTS = ModelFacts(
    family="llama", num_layers=2, hidden_size=8, num_heads=2, num_key_value_heads=1, head_size=4, vocabulary_size=64,
    max_positions=4096, dtype="float32", weight_bytes=0, trainable_bytes=0, num_trainable=0, largest_trainable_bytes=0,
    adapter=None,
)  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small model with a context of 100,000 tokens, of which there is a configuration only."""
    folder = tmp_path_factory.mktemp("model")
    return config_folder(folder, num_hidden_layers=2, vocab_size=900, max_position_embeddings=100_000)


@pytest.mark.slow
def test_no_pass_exceeds_the_cap_in_200_draws() -> None:
    """20 multi-turn requests on a common prompt, lengths up to the cap: it holds for what is really packed.

    The report's micro-batch held 205,000 tokens under a cap of 9,216. Passes are cut as the rank cuts them, with
    memory that never runs out, so that the cap alone decides; ``test_memory_reports`` has the whole rank. Lengths and
    cap are a tenth of the reported ones.
    """
    nothing = Price(required_bytes=0, retained_bytes=0, terms=(Term(name="nothing", num_bytes=0),), phase="none")
    plenty = Budget(budget_bytes=1, resident_bytes=0, available_bytes=1)
    for seed in range(200):
        draw = np.random.default_rng(seed)
        lengths = np.minimum(draw.lognormal(np.log(340) - 0.32, 0.8, 20).astype(int) + 1, CAP - 60)
        prompt = draw.integers(1, 64, 60)
        flat = flatten([completion(prompt, draw.integers(1, 64, int(length))) for length in lengths])
        (units,) = plan_order(flat, FACTS)
        group = Candidates(flat.leaves, units, PassByPass(lambda work: nothing, FACTS), None, CAP, FACTS)
        found = fit_passes(group.sharing, keeps_to_the_cap(group), most_rows=CAP)
        assert isinstance(found, FittedPasses)
        assert sorted(index for one in found.passes for index in group.indices(one)) == list(range(20))
        for one in found.passes:
            candidate, _ = group.admission(one, plenty, ())
            assert sum(work.batch.packed_rows for work in candidate.works) <= CAP


def test_a_small_model_needs_its_head_chunked_not_more_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """Qwen3-0.6B on 20,480 tokens and a GPU of 24 GB, all weights trained: the whole head is the top contributor.

    The first change named is to chunk it, with the bytes before and after; a larger device comes last.
    """
    step = ["--model", "Qwen3-0.6B", "--device", "A10G", "--full", "--shape", "completion=20480", "--json"]
    assert run(["plan", *step, "--head-chunk-rows", "20480"]) == FAILED
    plan = json.loads(capsys.readouterr().out)
    terms = plan["worst"]["terms"]
    assert max(terms, key=terms.__getitem__) == "head"
    assert terms["head"] >= 20480 * 151936 * 4
    assert "head 17.43 GiB" in plan["refusal"]
    assert "peak in head" in plan["refusal"] or "peak in backward" in plan["refusal"]
    changes = [fix["change"] for fix in plan["fixes"]]
    assert changes[0] == "chunk the head: 20,480 -> 512 rows"
    assert changes[-1].startswith("device: ")
    assert plan["fixes"][0]["after_bytes"] < find_device("A10G").usable_bytes < plan["fixes"][0]["before_bytes"]
    assert run(["plan", *step]) == SUCCESS
    chunked = json.loads(capsys.readouterr().out)
    assert chunked["peak_bytes"] == plan["fixes"][0]["after_bytes"] < plan["peak_bytes"] - 11 * GIB
    assert chunked["worst"]["terms"].get("head", 0) < terms["head"] / 10


def test_96_000_tokens_in_8_branches_cost_no_mask(small: str) -> None:
    """A dense mask of 96,000 x 96,000 takes 8.6 GiB by itself; the plan of the step has no such term."""
    shape = Shape.parse("g=8 prompt=48000 completion=6000")
    report = make_plan(Options(model=small, lora_rank=2), find_device("H200"), shape.requests)
    half = make_plan(
        Options(model=small, lora_rank=2), find_device("H200"), Shape.parse("g=8 prompt=24000 completion=3000").requests
    )
    assert report.worst is not None
    assert half.worst is not None
    assert (report.worst.packed_rows, half.worst.packed_rows) == (96_000, 48_000)
    # Twice the rows, twice the bytes: nothing grows with their square.
    assert report.worst.required_bytes <= 2.02 * half.worst.required_bytes
    assert report.worst.required_bytes < 96_000**2 / 8


def test_the_long_sample_of_a_data_set_is_known_before_step_1(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Completions of 600 tokens, one of 4,096 somewhere: the run would stop after 70 to 120 steps."""
    draw = np.random.default_rng(0)
    lengths = np.minimum(draw.lognormal(np.log(600), 0.8, 150).astype(int) + 2, 3900)
    lengths[97] = 4096
    rows = [{"tokens": (np.arange(n) % 900).tolist(), "trained": [0] + [1] * (n - 1)} for n in map(int, lengths)]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    command = ["plan", "--model", small, "--data", str(path), "--groups-per-step", "1", "--lora-rank", "2", "--json"]
    assert run([*command, "--memory", "40GiB"]) == SUCCESS
    plan = json.loads(capsys.readouterr().out)
    assert plan["data_set"]["longest_request"] == plan["worst"]["packed_rows"] == 4096
    assert plan["data_set"]["heaviest_step"] == [97]
    capacity = int((plan["peak_bytes"] + SEGMENTS_BYTES - plan["worst"]["required_bytes"] // 50) / 0.99)
    assert run([*command, "--memory", str(capacity)]) == FAILED
    refused = json.loads(capsys.readouterr().out)
    assert refused["data_set"]["refused"][0]["line"] == 98
    assert refused["refusal"].startswith("the request of line 98 of 4096 tokens")
    assert refused["short_bytes"] > 0


def test_groups_in_any_order_stay_below_what_the_data_set_plan_says(small: str) -> None:
    """Ten random orders, every step planned as the rank would."""
    draw = np.random.default_rng(3)
    groups = [
        [completion(prompt, draw.integers(1, 900, int(draw.integers(1, 300)))) for _ in range(3)]
        for prompt in (draw.integers(1, 900, int(draw.integers(5, 400))) for _ in range(6))
    ]
    options = Options(model=small, lora_rank=2)
    gpu = Device(name="test", usable_bytes=8 * GIB, multiprocessors=132)
    said = make_data_set_plan(options, gpu, DataSet(groups=groups, groups_per_step=2)).data_set
    assert said is not None
    peaks = []
    for _ in range(10):
        first, second = draw.permutation(6)[:2]
        peaks.append(make_plan(options, gpu, lambda _, a=first, b=second: [*groups[a], *groups[b]]).peak_bytes)
    assert max(peaks) <= said.worst_bytes
