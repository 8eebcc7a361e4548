"""Runs a piece of Python in its own process: an allocator is installed for the life of one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap


def run_python(code: str, **environment: str) -> str:
    """Return the standard output of ``code``; its failure is the test's."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
