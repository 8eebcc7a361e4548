"""Dependencies point down: the contracts in pyproject.toml hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def lint_imports(config: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the installed package with a configuration."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    return subprocess.run(
        [*command, "--config", str(config), "--no-cache"], cwd=folder, capture_output=True, text=True, check=False
    )


def test_every_contract_is_kept() -> None:
    """Layers point down, and the pure ones import no torch."""
    done = lint_imports(ROOT / "pyproject.toml", ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 kept, 0 broken" in done.stdout


@pytest.mark.parametrize("layers", ["trainer_rank.requests\n    trainer_rank.session"])
def test_the_check_can_fail(tmp_path: Path, layers: str) -> None:
    """With the layers upside down the same command complains."""
    config = tmp_path / "upside_down.ini"
    config.write_text(
        "[importlinter]\nroot_package = trainer_rank\n\n"
        f"[importlinter:contract:1]\nname = Upside down\ntype = layers\nlayers =\n    {layers}\n"
    )
    done = lint_imports(config, tmp_path)
    assert done.returncode != 0
    assert "BROKEN" in done.stdout
