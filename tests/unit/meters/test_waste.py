"""The allocator's waste: which settings it goes by."""

from __future__ import annotations

import pytest

from trainer_rank.meters.waste import expandable_by_environment, waste_bytes


@pytest.mark.parametrize(
    ("variable", "said", "expandable"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128, expandable_segments: true", True),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", False),
        ("PYTORCH_CUDA_ALLOC_CONF", "", False),
    ],
)
def test_settings_are_read_where_torch_reads_them(
    monkeypatch: pytest.MonkeyPatch, variable: str, said: str, expandable: bool
) -> None:
    """Either variable, in any case, with other settings beside it."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, said)
    assert expandable_by_environment() == expandable


def test_the_waste_is_a_share_of_what_is_handed_out() -> None:
    """Of 125 free bytes, 100 are handed out at a quarter; nothing is taken from nothing."""
    assert waste_bytes(125, 0.25) == 25
    assert waste_bytes(-5, 0.1) == 0
    assert waste_bytes(110, 0.0) == 0
