"""``trainer-rank plan``: verdicts as text, JSON and a page, and wrong input by name."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.builders import config_folder
from trainer_rank.cli.main import FAILED, SUCCESS, WRONG_INPUT, run
from trainer_rank.cli.plan_display import print_text
from trainer_rank.planning.report import Fix, Instant, PassReport, PlanReport, Tree
from trainer_rank.units import GIB, MIB

SHAPE = "groups=2 g=3 system=24 prompt=40 completion=20"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the configuration of a small model, and no weights."""
    return config_folder(tmp_path_factory.mktemp("model"), max_position_embeddings=9000)


def one_pass(number: int) -> PassReport:
    return PassReport(
        requests=8, packed_rows=1000 + number, logical_tokens=4000, head_rows=500, segments=9,
        required_bytes=3 * GIB, retained_bytes=GIB, phase="recompute", layer=3,
        terms={"checkpointed inputs": GIB, "temporaries": 2 * GIB},
    )  # fmt: skip


def report(**fields: Any) -> PlanReport:
    """A plan of ten equal passes on a device of 10 GiB."""
    known: dict[str, Any] = {
        "model": "m", "device": "d", "fits": True, "capacity_bytes": 10 * GIB, "resident": {"weights": 4 * GIB},
        "options": {"lora_rank": 2, "dtype": "bfloat16", "recompute": "full", "head_chunk_rows": 64,
                    "caller_bytes_per_token": 0},
        "reserve_bytes": GIB, "pending": {"optimizer state to come": GIB}, "passes": tuple(map(one_pass, range(10))),
        "worst": one_pass(0), "refusal": None, "short_bytes": 0, "peak_bytes": 8 * GIB,
        "timeline": (Instant(phase="forward", layer=3, peak_bytes=2 * GIB, end_bytes=GIB),
                     Instant(phase="recompute", layer=3, peak_bytes=3 * GIB, end_bytes=0)),
        "tree": Tree(parent=(-1, 0, 0), rows=(600, 200, 200), ends=(0, 4, 4)),
    }  # fmt: skip
    return PlanReport(**{**known, **fields})


def text_of(plan: PlanReport, *, all_passes: bool = False) -> str:
    """Return what people read, 100 columns wide."""
    out = io.StringIO()
    print_text(plan, all_passes=all_passes, console=Console(file=out, width=100, highlight=False))
    return out.getvalue()


def test_the_bar_is_to_the_scale_of_the_device_and_its_legend_sums_up() -> None:
    """Four tenths weights, one optimizer state, one kept, two at work, the rest free."""
    lines = text_of(report()).splitlines()
    assert lines[0] == "fits: m on d in 10 passes, peak 8.00 GiB of 10.00 GiB, in recompute"
    bar = lines[1][1:-1]
    assert [round(bar.count(letter) / len(bar), 1) for letter in "WOKA."] == [0.4, 0.1, 0.1, 0.2, 0.2]
    assert ".  free                     1.00 GiB  10.0%" in "\n".join(lines)


def test_passes_are_shortened_with_their_number_said() -> None:
    """And listed whole when asked for."""
    assert "8 of 10 passes shown; --all-passes lists them" in text_of(report())
    whole = text_of(report(), all_passes=True)
    assert "--all-passes" not in whole
    assert "1,009" in whole


def test_a_refusal_shows_what_is_beyond_the_device_and_what_would_help() -> None:
    """The bar ends in a mark; each change with bytes before and after."""
    fixes = (Fix(change="recompute: none -> full", before_bytes=31 * GIB, after_bytes=6 * GIB, passes=2),)
    text = text_of(report(fits=False, passes=(), capacity_bytes=6 * GIB, refusal="request 3 is too long",
                          short_bytes=2 * GIB, fixes=fixes))  # fmt: skip
    assert text.startswith("does not fit: m on d, 2.00 GiB short\n")
    assert text.splitlines()[1].endswith(">")
    assert "request 3 is too long" in text
    assert "recompute: none -> full          31.00 GiB -> 6.00 GiB" in text


def test_the_phases_of_the_worst_pass_are_listed_with_what_the_device_holds() -> None:
    """Resident and pending bytes included."""
    assert "recompute  layer 3           3.00 GiB      8.00 GiB          80.0%" in text_of(report())


def test_json_holds_everything_and_the_page_needs_no_network(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One run, all three forms; the page carries the same JSON."""
    pytest.importorskip("plotly")
    page = tmp_path / "plan.html"
    arguments = ["plan", "--model", model, "--memory", "1GiB", "--shape", SHAPE, "--html", str(page)]
    assert run([*arguments, "--json"]) == SUCCESS
    plan = json.loads(capsys.readouterr().out)
    assert (plan["schema_version"], plan["fits"], len(plan["passes"])) == (1, True, 1)
    assert plan["peak_bytes"] == (
        sum(plan["resident"].values()) + sum(plan["pending"].values()) + plan["worst"]["required_bytes"]
    )
    assert max(one["peak_bytes"] for one in plan["timeline"]) == plan["worst"]["required_bytes"]
    assert sum(plan["tree"]["rows"]) == plan["worst"]["packed_rows"] == 24 + 2 * 40 + 6 * 20
    assert sum(plan["tree"]["ends"]) == 6
    text = page.read_text(encoding="utf-8")
    inside = text.partition('<script type="application/json" id="plan">')[2].partition("</script>")[0]
    assert json.loads(inside) == plan
    after = text.rpartition("</style>")[2]
    assert 'src="http' not in after
    assert all(f'id="{chart}"' in text for chart in ("capacity", "timeline", "passes", "tree"))


def test_names_from_outside_stay_text_in_the_page(tmp_path: Path) -> None:
    """A model's name is no markup, and cannot end the script it stands in."""
    pytest.importorskip("plotly")
    from trainer_rank.cli.plan_html import write_page

    write_page(report(model="</script><b>x"), tmp_path / "p.html")
    body = (tmp_path / "p.html").read_text(encoding="utf-8").rpartition("</style>")[2]
    assert "</script><b>x" not in body


def test_a_step_that_does_not_fit_exits_with_1(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With the changes that were priced, a shorter completion among them, and a larger device last."""
    arguments = ["plan", "--model", model, "--memory", "600MiB", "--shape", "prompt=10 completion=8000"]
    assert run([*arguments, "--json"]) == FAILED
    plan = json.loads(capsys.readouterr().out)
    assert not plan["fits"]
    assert plan["short_bytes"] > 0
    changes = [fix["change"] for fix in plan["fixes"]]
    assert all(fix["after_bytes"] < 600 * MIB for fix in plan["fixes"][:-1])
    assert changes[0].startswith("completion: 8,000 -> ")
    assert changes[-1].startswith("device: ")
    # Made, the first change gives the plan it promises.
    fewer = changes[0].removeprefix("completion: 8,000 -> ").removesuffix(" tokens").replace(",", "")
    assert run([*arguments[:-1], f"prompt=10 completion={fewer}", "--json"]) == SUCCESS
    assert json.loads(capsys.readouterr().out)["peak_bytes"] == plan["fixes"][0]["after_bytes"]


def test_a_run_is_planned_from_its_configuration(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Model, data, options and budget are the run's own."""
    rows = [{"tokens": [1, 2, 3, 4 + group, 9], "trained": [0, 0, 0, 1, 1], "group": str(group)} for group in range(3)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model: {{path: '{model}', dtype: bfloat16, lora: {{rank: 3, targets: [q_proj]}}}}\n"
        f"data: {{path: '{data}'}}\nepochs: 1\ngroups_per_step: 2\nmemory_budget: 1GiB\n",
        encoding="utf-8",
    )
    assert run(["plan", "--config", str(config), "--json"]) == SUCCESS
    plan = json.loads(capsys.readouterr().out)
    assert (plan["options"]["lora_rank"], plan["options"]["lora_targets"]) == (3, ["q_proj"])
    assert (plan["capacity_bytes"], plan["data_set"]["groups_per_step"]) == (GIB, 2)
    assert plan["peak_bytes"] <= plan["data_set"]["worst_bytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", SHAPE, "--device", "H200"], "--model must name"),
        (["--model", "m", "--device", "H200"], "exactly one of --shape and --data"),
        (["--model", "m", "--shape", SHAPE], "exactly one of --device and --memory"),
        (["--model", "m", "--shape", SHAPE, "--device", "H200", "--memory", "1GiB"], "exactly one of --device and"),
        (["--model", "m", "--shape", SHAPE, "--device", "H2000"], "nearest: H200"),
        (["--model", "m", "--shape", SHAPE, "--memory", "nan"], "--memory must be a number of bytes"),
        (["--model", "m", "--shape", SHAPE, "--memory", "-1GiB"], "--memory must be a number of bytes"),
        (["--model", "m", "--shape", SHAPE, "--memory", "0"], "--memory must be more than 0"),
        (["--model", "m", "--shape", "g=0 completion=1", "--device", "L4"], "shape.g must be a whole number of at"),
        (["--model", "m", "--shape", SHAPE, "--device", "L4", "--full", "--lora-rank", "8"], "give one of them"),
        (["--model", "m", "--shape", SHAPE, "--device", "L4", "--recompute", "some"], "--recompute must be full or"),
        (["--model", "m", "--shape", SHAPE, "--device", "L4", "--dtype", "int4"], "--dtype must be bfloat16 or"),
        (["--model", "m", "--shape", SHAPE, "--device", "L4", "--head-chunk-rows", "0"], "--head-chunk-rows must be"),
        (["--model", "m", "--shape", SHAPE, "--device", "L4", "--caller-bytes-per-token", "-1"], "at least 0, got -1"),
        (["--model", "m", "--shape", SHAPE, "--device", "L4", "--groups-per-step", "2"], "belongs to --data"),
        (["--model", "Qwen3-9B", "--shape", SHAPE, "--device", "L4"], "nearest: Qwen3-8B"),
        (["--model", "m", "--data", "none.jsonl", "--device", "L4"], "none.jsonl: cannot be read"),
        (["--config", "none.yaml", "--model", "m", "--device", "L4"], "leave out --model, or --config"),
        (["--model", "m", "--shape", SHAPE, "--device", "L4", "--html", "no/where/p.html"], "folder that exists"),
    ],
)
def test_wrong_input_is_refused_by_name(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field, rule, value; exit status 2, nothing on stdout."""
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["plan", *arguments]) == WRONG_INPUT
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
