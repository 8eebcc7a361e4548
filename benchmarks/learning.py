"""What learning beside the trace costs a step, and whether what it keeps of a long history stands for all of it.

Passes of all sizes, of one signature, whose traced price is short of a cost that scatters, bends, is rare or grows as
larger passes come; 400 observations of each kind, one by one, with seeds 0 to 4:

* ``never_enough``: observed passes that are charged less than they needed, in the end (to the byte);
* ``not_the_same``: residuals that come back from their plain values other than they were;
* ``charged_median``, ``charged_p95``: charged by needed of the observed passes, of all kinds but the rare one;
* ``fit_ms``: taking in one observation; ``price_us``: the learned part of one price.

Those two are process CPU time. And through a store on this disk, wall-clock: ``write_ms`` and ``write_p95_ms`` are one
call's ``LearnedStore.merge`` of one observation that was short of nothing, ``write_short_ms`` of one that was short;
``load_ms`` reads a store of 40 signatures. ``lost`` of ``written`` observations that four processes write at once.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from _harness import finish, pin_threads, quick, target

pin_threads(1)

import numpy as np  # noqa: E402

from trainer_rank.memory import Residual, Seen  # noqa: E402
from trainer_rank.store import LearnedStore  # noqa: E402

FACTS = {"model": {"family": "llama"}, "device": "cpu", "versions": {}}
KINDS = ("scatters", "bends", "rare", "grows")

WRITER = """
import sys
from pathlib import Path
from trainer_rank.store import LearnedStore
store = LearnedStore(Path(sys.argv[1]))
for number in range(int(sys.argv[3])):
    store.merge({"device": "cpu"}, "envelope", {"{}": [[int(sys.argv[2]) + number, 1, 10, 9]]})
"""


def passes(kind: str, count: int, seed: int) -> Iterator[Seen]:
    """Yield passes in the order they run."""
    draw = np.random.default_rng(seed)
    for number in range(count):
        rows = int(draw.integers(50, 200 + 100 * number if kind == "grows" else 16_000))
        tokens, chance = int(rows * draw.uniform(1, 8)), float(draw.uniform())
        predicted = 300_000 * rows + 20_000 * tokens + 66_000_000
        short = {
            "scatters": 50e6 + 2000 * rows + 20e6 * chance,
            "bends": 1e6 * rows**0.5 * (0.8 + 0.2 * chance),
            "rare": 500e6 if chance > 0.97 else -1e6,
            "grows": 1000 * rows * chance,
        }[kind]
        yield Seen(
            packed_rows=rows, logical_tokens=tokens, predicted_bytes=predicted, peak_bytes=predicted + int(short)
        )


def histories(count: int, seeds: int) -> dict[str, float]:
    never_enough = not_the_same = 0
    charged: list[float] = []
    fits: list[float] = []
    prices: list[float] = []
    for kind in KINDS:
        for seed in range(seeds):
            found, ran = Residual(), []
            for one in passes(kind, count, seed):
                fits.append(milliseconds(lambda one=one, found=found: found.observe(one), time.process_time))
                found = found.observe(one)
                ran.append(one)
            not_the_same += Residual.from_json(found.to_json()) != found
            begin = time.process_time()
            required = [one.predicted_bytes + found.extra_bytes(*one.size) for one in ran]
            prices.append((time.process_time() - begin) / len(ran) * 1e6)
            needed = [max(one.peak_bytes, one.predicted_bytes) for one in ran]
            never_enough += sum(ours < least for ours, least in zip(required, needed, strict=True))
            if kind != "rare":
                charged += [ours / least for ours, least in zip(required, needed, strict=True)]
    return {
        "never_enough": never_enough,
        "not_the_same": not_the_same,
        "charged_median": float(np.median(charged)),
        "charged_p95": float(np.quantile(charged, 0.95)),
        "fit_ms": statistics.median(fits),
        "fit_p95_ms": float(np.quantile(fits, 0.95)),
        "price_us": statistics.median(prices),
    }


def stored(folder: Path, repeats: int) -> dict[str, float]:
    store = LearnedStore(folder / "learned.sqlite3")
    enough = [[one.packed_rows, one.logical_tokens, one.peak_bytes, one.peak_bytes] for one in passes("bends", 200, 0)]
    short = [one.values for one in passes("bends", 200, 1)]
    for number in range(40):
        store.merge(FACTS, "envelope", {f'{{"n": {number}}}': short if number % 2 else enough})
    more = [one.values for one in passes("bends", repeats, 2)]
    writes = [
        milliseconds(lambda one=one: store.merge(FACTS, "envelope", {'{"n": 0}': [[*one[:2], one[3], one[3]]]}))
        for one in more
    ]
    short_writes = [milliseconds(lambda one=one: store.merge(FACTS, "envelope", {'{"n": 1}': [one]})) for one in more]
    return {
        "write_ms": statistics.median(writes),
        "write_p95_ms": float(np.quantile(writes, 0.95)),
        "write_short_ms": statistics.median(short_writes),
        "load_ms": statistics.median(milliseconds(lambda: store.load(FACTS, "envelope")) for _ in range(9)),
    }


def contended(folder: Path, each: int) -> dict[str, float]:
    path = folder / "shared.sqlite3"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(number * each), str(each)], env=os.environ)
        for number in range(4)
    ]
    if any(writer.wait() for writer in writers):
        raise SystemExit("a writer failed")
    (entry,) = LearnedStore(path).entries()
    return {"written": 4 * each, "lost": 4 * each - entry.observations}


def milliseconds(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    begin = clock()
    run()
    return (clock() - begin) * 1e3


def main() -> None:
    small = quick()
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        figures = {
            **histories(40 if small else 400, 1 if small else 5),
            **stored(Path(folder), 5 if small else 200),
            **contended(Path(folder), 5 if small else 100),
        }
    finish(
        "learning",
        figures,
        [
            target("never_enough", "eq", 0),
            target("not_the_same", "eq", 0),
            target("lost", "eq", 0),
            target("write_ms", "le", 5),
        ],
    )


if __name__ == "__main__":
    main()
