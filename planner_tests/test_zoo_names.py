"""Names of models are refused without torch, and no name that can be built is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from asa.errors import UnavailableError, UsageError
from asa.zoo import names


def test_the_names_are_those_that_can_be_built() -> None:
    from asa.zoo import models, plain

    assert set(names.OWN) == set(plain.PLAIN)
    built = {*models.names(), *models.segmentation_names()}
    assert {*names.of_torchvision(), *names.OWN} == built
    for name in built:
        names.check(name)


def test_near_names_are_named() -> None:
    with pytest.raises(UsageError, match=r"'DenseNet-121'; did you mean densenet121"):
        names.check("DenseNet-121")
    with pytest.raises(UsageError, match="'qqqq'; `package"):
        names.check("qqqq")


def test_where_there_is_no_source_to_read_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "of_torchvision", frozenset)
    names.check("qqqq")


def test_a_factory_is_looked_for_here_and_among_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_file.py").write_text("def f(): ...\nraise RuntimeError('imported')")
    (tmp_path / "own_folder").mkdir()
    (tmp_path / "own_folder" / "deep.py").write_text("from elsewhere import models as f")
    (tmp_path / "by_magic.py").write_text("globals()['f'] = int")
    (tmp_path / "by_star.py").write_text("from own_file import *")
    (tmp_path / "broken.py").write_text("def (")
    for spec in (
        "own_file:f",
        "own_folder.deep:f.g",
        "by_magic:f",
        "by_star:f",
        "broken:f",
        "wave:open",
        "pytest:mark",
    ):
        names.check(spec)
    with pytest.raises(UsageError, match=r"own_file has no 'ff'; did you mean f\?"):
        names.check("own_file:ff")
    with pytest.raises(UsageError, match=r"no module 'own_folder.shallow' to import"):
        names.check("own_folder.shallow:f")
    with pytest.raises(UsageError, match=r"no module 'own_gone.deep' to import from here"):
        names.check("own_gone.deep:f")
    with pytest.raises(UsageError, match="is not of the form package"):
        names.check("own_file:")
    for spec in ("own_folder/deep.py:f", "./own_folder/deep.py:f", "own_folder.deep.py:f"):
        with pytest.raises(UsageError, match=r"names a file; name its module: own_folder.deep:f"):
            names.check(spec)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match="pip install timm"):
        names.check("timm:resnet18")


def test_commands_refuse_a_name_before_they_import_torch(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom asa.cli.entry import run\n"
        "for words in ('plan', 'plan --cluster a100-nvlink-8', 'profile', 'bench --models'):\n"
        "    assert run([*words.split(), 'resnet5O']) == 2, words\n"
        "print([m for m in ('torch', 'torchvision') if m in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=480, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    assert done.stderr.count("did you mean resnet50") == 4
