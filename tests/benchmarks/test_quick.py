"""Every benchmark runs in quick mode and reports in the agreed form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if not path.name.startswith("_"))


@pytest.mark.parametrize("script", BENCHMARKS, ids=lambda path: path.stem)
def test_the_last_line_of_a_quick_run_is_the_agreed_object(script: Path, tmp_path: Path) -> None:
    """Name, hardware, numeric figures and targets; the same object lands in the output directory."""
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(script), "--quick", "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert set(result) == {"benchmark", "hardware", "figures", "targets"}
    assert result["benchmark"] == script.stem
    assert {"cpu", "cores", "threads", "memory_gib", "python"} <= set(result["hardware"])
    assert result["figures"]
    assert all(isinstance(value, int | float) for value in result["figures"].values())
    assert result["targets"] == []
    assert json.loads((tmp_path / f"{script.stem}.json").read_text(encoding="utf-8")) == result
