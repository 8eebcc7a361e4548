"""Names every package this Python lacks, or has too old, for the CUDA checks, and says how to bring it. Exit 1 if any.

A machine with a CUDA device brings its own torch, which is kept; packages come as wheels in a folder ``wheels``.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def wanted() -> list[str]:
    """Return the requirements of the library with Transformers, and of its tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["transformers"], "pytest>=8"]


def unmet(line: str, seen: set[str]) -> Iterator[tuple[str, str]]:
    """Yield (requirement, what is there instead) for a requirement and, below it, for what it requires itself."""
    from packaging.requirements import Requirement

    requirement = Requirement(line)
    if requirement.name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
        return
    seen.add(requirement.name)
    try:
        found = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        yield f"{requirement.name}{requirement.specifier}", "missing"
        return
    if not requirement.specifier.contains(found, prereleases=True):
        yield f"{requirement.name}{requirement.specifier}", f"{found} is there"
    elif requirement.name != "torch":
        for below in metadata.requires(requirement.name) or ():
            yield from unmet(below, seen)


def main() -> int:
    """Print one line per unmet requirement and the two commands that meet them."""
    if not any(metadata.distributions(name="packaging")):
        lacking = [("packaging", "missing")]
    else:
        seen: set[str] = set()
        lacking = [each for line in wanted() for each in unmet(line, seen)]
    if not lacking:
        return 0
    for requirement, found in lacking:
        print(f"gpu_check: needs {requirement}: {found}")
    names = " ".join(f"'{requirement}'" for requirement, _ in lacking)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    print(
        "gpu_check: where there is an index, download wheels into the folder wheels/ of this repository:\n"
        f"    pip download --no-deps --only-binary=:all: --python-version {version} --implementation cp"
        f" --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 -d wheels {names}\n"
        "gpu_check: carry it here and run this script again, which installs them aside, or install them yourself:\n"
        f"    {sys.executable} -m pip install --no-index --no-deps --find-links wheels {names}\n"
        "    PYTHON=... PYTHONPATH=src scripts/gpu_check.sh"
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
