"""What every benchmark shares: pinned threads, paired timing, and one JSON object as the last line of output.

    from _harness import finish, pin_threads, quick, target
    pin_threads(1)                                  # before numpy or torch is imported
    ...
    finish("name", {"seconds": 0.2}, [target("seconds", "le", 0.5)])

Options of every benchmark: ``--quick`` shrinks it to a smoke run without targets, ``--output DIR`` also writes the JSON
object to DIR/<name>.json. Exit status 1 when a target is missed.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn, TypeAlias, TypedDict

Op: TypeAlias = Literal["le", "ge", "eq"]

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Target(TypedDict):
    """A figure's bound."""

    key: str
    op: Op
    value: float


class PairedMedians(NamedTuple):
    """Medians of interleaved runs, process CPU seconds; ``ratio`` is the median of a's time over b's, pair by pair."""

    a_seconds: float
    b_seconds: float
    ratio: float


def pin_threads(count: int) -> None:
    """Run on ``count`` CPUs with ``count`` threads per library. Call before numpy or torch is imported."""
    for name in _THREAD_VARIABLES:
        os.environ[name] = str(count)
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        # The last CPUs: the first one also serves most of the machine's interrupts.
        os.sched_setaffinity(0, allowed[-count:])
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(count)


def quick() -> bool:
    """Return whether ``--quick`` was given."""
    return "--quick" in sys.argv[1:]


def target(key: str, op: Op, value: float) -> Target:
    """Return the bound ``figures[key] op value``."""
    return Target(key=key, op=op, value=value)


def median_seconds(run: Callable[[], object], repeats: int) -> float:
    """Return the median process CPU seconds of ``repeats`` runs, after one that is not counted."""
    run()
    return statistics.median(_cpu_seconds(run) for _ in range(repeats))


def paired_medians(a: Callable[[], object], b: Callable[[], object], repeats: int) -> PairedMedians:
    """Time ``a`` and ``b`` in turn, ``repeats`` times, after one run of each that is not counted.

    Neighbouring runs meet the same disturbances, so the median of paired ratios is steadier than the ratio of medians.
    """
    a()
    b()
    pairs = [(_cpu_seconds(a), _cpu_seconds(b)) for _ in range(repeats)]
    return PairedMedians(
        a_seconds=statistics.median(first for first, _ in pairs),
        b_seconds=statistics.median(second for _, second in pairs),
        ratio=statistics.median(first / second for first, second in pairs),
    )


def hardware() -> dict[str, str | int | float]:
    """Return what the figures depend on: processor, cores this process may use, memory, threads, versions."""
    found: dict[str, str | int | float] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": int(os.environ.get("OMP_NUM_THREADS", "0")),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1024**3, 1),
        "python": platform.python_version(),
    }
    for package in ("numpy", "torch"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")
    if torch is not None:
        found["threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            found["gpu"] = torch.cuda.get_device_name()
    return found


def finish(name: str, figures: Mapping[str, float], targets: Sequence[Target]) -> NoReturn:
    """Print the JSON object of benchmark ``name`` as the last line and exit: 1 when a target is missed, else 0.

    A quick run keeps its figures, names no targets and exits 0. Raises KeyError for a target without a figure.
    """
    judged = [] if quick() else [{**item, "met": _is_met(figures[item["key"]], item)} for item in targets]
    result = {
        "benchmark": name,
        "hardware": hardware(),
        "figures": {key: _rounded(value) for key, value in figures.items()},
        "targets": judged,
    }
    line = json.dumps(result, allow_nan=False)
    directory = _output_directory()
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{name}.json").write_text(json.dumps(result, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    print(line, flush=True)
    sys.exit(0 if all(item["met"] for item in judged) else 1)


def _is_met(figure: float, item: Target) -> bool:
    if item["op"] == "le":
        return figure <= item["value"]
    if item["op"] == "ge":
        return figure >= item["value"]
    return figure == item["value"]


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _cpu_seconds(run: Callable[[], object]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def _output_directory() -> Path | None:
    arguments = sys.argv[1:]
    if "--output" not in arguments:
        return None
    where = arguments.index("--output") + 1
    if where == len(arguments):
        sys.exit("--output needs a directory")
    return Path(arguments[where])


def _cpu_model() -> str:
    table = Path("/proc/cpuinfo")
    if table.exists():
        for line in table.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
