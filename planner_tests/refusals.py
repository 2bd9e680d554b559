"""A user's folder, and what a command that is refused there says."""

from __future__ import annotations

import os
from pathlib import Path

import nouns
import pytest

from asa.cli import entry, places
from asa.ir import codec


def user_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be in ``folder``, with one profile and one cluster of two CPU ranks, and nothing that was shipped."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(places, "SHIPPED", folder / "source" / "profiles")
    for name in [n for n in os.environ if n.startswith("ASA_")]:
        monkeypatch.delenv(name)
    codec.save(nouns.profile(), folder / "profiles" / "tiny.json")
    codec.save(nouns.cluster(), folder / "profiles" / "cluster.box.json")
    return folder


def refused(capsys: pytest.CaptureFixture[str], code: int, *argv: str) -> str:
    """The one line a command ends with."""
    assert entry.run(argv) == code, capsys.readouterr()
    said = capsys.readouterr()
    assert said.out == ""
    last = said.err.strip().splitlines()[-1]
    assert last.startswith("asa: ")
    assert "internal error" not in last
    return last
