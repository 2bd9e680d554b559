"""A line about programs that scale numbers by how many processes there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from asa.api.process_counts import _asks


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("lr = 0.1 * dist.get_world_size()", True),
        ('steps //= int(os.environ["WORLD_SIZE"])', True),
        ("rank = os.environ.get('RANK', '0')", False),
        ("world_size = 3  # of the game", False),
    ],
)
def test_a_script_that_asks_is_found(text: str, found: bool, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(text)
    assert _asks(str(script)) is found


def test_no_script_is_none() -> None:
    assert not _asks(None)
    assert not _asks("<stdin>")
