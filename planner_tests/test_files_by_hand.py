"""What docs/files.md says of files by hand: its examples are planned from as they stand there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from asa.cli import entry

PAGE = Path(__file__).resolve().parent.parent / "docs" / "files.md"


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A directory with the files of the page."""
    monkeypatch.chdir(tmp_path)
    found = re.findall(r"<!-- (\w+\.json) -->\n```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert [name for name, _ in found] == ["cluster.json", "profile.json"]
    for name, text in found:
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_examples_are_planned_from(place, capsys):
    assert entry.run(["plan", "profile.json", "--cluster", "cluster.json", "--time-limit", "1s", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    body, head = made["components"]
    assert (body["data"]["degree"], body["tensor"]["degree"]) == (4, 1)
    assert (head["tensor"]["strategy"], head["tensor"]["degree"]) == ("tensor", 4)
    found = ["--profile", "profile.json", "--cluster", "cluster.json"]
    assert entry.run(["explain", *found]) == 0
    assert entry.run(["simulate", *found]) == 0


def test_a_preset_that_was_shown_can_be_changed(place, capsys):
    assert entry.run(["cluster", "show", "a100-nvlink-8", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    shown["device"]["memory_bytes"] //= 2
    (place / "mine.json").write_text(json.dumps(shown))
    assert entry.run(["cluster", "show", "mine.json"]) == 3
    assert "leave the fingerprint out" in capsys.readouterr().err
    del shown["fingerprint"]
    (place / "mine.json").write_text(json.dumps(shown))
    assert entry.run(["cluster", "show", "mine.json"]) == 0
