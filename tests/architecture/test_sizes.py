"""Small files, one idea each."""

from __future__ import annotations

from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "trainer_rank"
MOST_LINES = 400


def test_no_source_file_is_longer_than_it_can_be_read() -> None:
    """Files above the limit are listed with their lengths."""
    files = [*SOURCE.rglob("*.py"), *SOURCE.rglob("*.cpp")]
    assert len(files) > 40
    lengths = {str(path.relative_to(SOURCE)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    offenders = {name: length for name, length in lengths.items() if length > MOST_LINES}
    assert not offenders


def test_every_package_says_what_it_is() -> None:
    """Each module begins with a docstring, empty package markers aside."""
    bare = [
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if (text := path.read_text(encoding="utf-8")).strip() and not text.lstrip().startswith(('"""', "'''"))
    ]
    assert not bare
