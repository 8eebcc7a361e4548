"""One thread per library: tiny tensors gain nothing from more, and numbers do not depend on the machine."""

from __future__ import annotations

import itertools
import os
import tempfile

import pytest

# Read when torch is imported, which happens with the first test module.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

# Envelopes that tests make stay with the tests, and none is found that another version made.
_cache = tempfile.TemporaryDirectory(prefix="trainer-rank-tests-")
os.environ["XDG_CACHE_HOME"] = _cache.name
_counter = itertools.count()


@pytest.fixture(autouse=True)
def a_store_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run of one test learns is not what another begins with."""
    monkeypatch.setenv("XDG_DATA_HOME", os.path.join(_cache.name, f"data-{next(_counter)}"))
