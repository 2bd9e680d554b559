"""What import-linter cannot see: no torch where thinking is done, every command documented, every sample true."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import nouns
import pytest

from asa.cli import entry
from asa.ir import codec

ROOT = Path(__file__).resolve().parent.parent
VERBS = [verb for word in entry.VERBS for verb in entry.verbs(word)]
THINKING = ("asa", "asa.ir.plan", "asa.interfaces.strategy", "asa.strategies", "asa.cost", "asa.planner")
    "asa",
    "asa.ir.plan",
    "asa.interfaces.strategy",
    "asa.strategies",
    "asa.cost",
    "asa.planner",
    "asa.simulator",
)
ROOFS = ("asa.simulator", "asa.scheduler", "asa.report", "asa.report.page", "asa.cli.entry")


def python(code: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_thinking_and_the_command_line_start_without_torch(tmp_path):
    verbs = [module for module, _ in entry.VERBS.values()]
    imports = "".join(f"import {name}\n" for name in (*THINKING, *ROOFS, *verbs))
    heavy = "[m for m in ('torch', 'torchvision', 'sklearn') if m in sys.modules]"
    assert python(f"import sys\n{imports}print({heavy})", tmp_path).strip() == "[]"


def test_planning_from_a_profile_never_imports_torch(tmp_path):
    codec.save(nouns.profile(), tmp_path / "profiles" / "tiny.json")
    codec.save(nouns.cluster(), tmp_path / "profiles" / "cluster.box.json")
    code = (
        "import sys\nfrom asa.cli.entry import run\n"
        "code = run(['plan', 'profiles/tiny.json', '--gpus', '2', '--cluster', 'box', '--json'])\n"
        "assert code == 0, code\nassert 'torch' not in sys.modules\n"
    )
    data = json.loads(python(code, tmp_path))
    assert [c["name"] for c in data["components"]] == ["stem", "body.0", "head"]
    assert {"ddp", "single"} <= {b["name"] for b in data["baselines"]}


@pytest.mark.parametrize("verb", VERBS, ids=lambda v: v.name)
def test_every_command_is_in_the_readme(verb):
    assert f"asa {verb.name}" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("verb", [v for v in VERBS if v.name != "config show"], ids=lambda v: v.name)
def test_every_command_has_a_sample_document(verb):
    assert (ROOT / "docs" / "samples" / f"{verb.name.replace(' ', '-')}.json").is_file()


def test_links_in_the_documents_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} points to {target}"
