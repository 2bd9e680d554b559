"""A line about programs that scale numbers by how many processes there are."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

import asa
from asa.api.loop.process_counts import _asks, _own_files


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("lr = 0.1 * dist.get_world_size()", True),
        ('steps //= int(os.environ["WORLD_SIZE"])', True),
        ("def get_world_size() -> int: return 1", False),
        ("rank = os.environ.get('RANK', '0')", False),
        ("world_size = 3  # of the game", False),
    ],
)
def test_a_script_that_asks_is_found(text: str, found: bool, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(text)
    assert _asks(str(script)) is found


def test_no_script_is_none() -> None:
    assert not _asks("<stdin>")


def test_modules_of_the_program_are_looked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "parts_of_mine").mkdir()
    names = ("settings_of_mine", "parts_of_mine.settings")
    paths = [tmp_path / f"{name.replace('.', '/')}.py" for name in names]
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        for name, path in zip(names, paths, strict=True):
            path.write_text("import os\nRANKS = int(os.environ.get('WORLD_SIZE', 1))\n")
            importlib.import_module(name)
        assert set(map(str, paths)) <= set(filter(_asks, _own_files()))
    finally:
        for name in (*names, "parts_of_mine"):
            sys.modules.pop(name, None)  # which would have every later program ask
    packages = [Path(str(package.__file__)).parent for package in (asa, torch)]
    assert not any(Path(file).is_relative_to(package) for file in _own_files() for package in packages)
