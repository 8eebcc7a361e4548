"""The command line asks torch for expandable segments, and never against the user's word."""

from __future__ import annotations

import pytest

from trainer_rank.cli import main

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, ""),
    ],
)
def test_expandable_segments_unless_the_user_chose(
    said: dict[str, str], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under either of torch's names, in the environment of the whole process."""
    # An empty variable says nothing, and is put back afterwards whatever was set meanwhile.
    for name in NAMES:
        monkeypatch.setenv(name, said.get(name, ""))
    monkeypatch.setattr(main, "run", lambda arguments: 0)
    with pytest.raises(SystemExit):
        main.main()
    assert main.os.environ.get("PYTORCH_ALLOC_CONF") == wanted
