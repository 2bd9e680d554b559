"""Commands on the pages of docs are commands: all are understood, and those of the three walks are run in order."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import nouns
import pytest
import torch
from forked import asa
from started import rank_of, together

from asa.cli.settings import arguments, parser
from asa.cli.verb import Verb
from asa.cli.verbs import verbs
from asa.ir import codec
from asa.profiler.machine import device_record

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(p for p in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.M | re.S)
EXAMPLE = re.compile(r"^```text\n((?:asa .*\n)+)```", re.M)
"""Blocks of nothing but commands, on files that a reader has."""
INLINE = re.compile(r"`(asa [^`]+)`")
OPEN = re.compile(r"[A-Z]{2,}|\b[A-Z]\b|\.\.\.|[|\[(]")
"""Words that stand for what a reader fills in."""


def commands(page: Path, block: re.Pattern[str] = BLOCK) -> list[list[str]]:
    """The commands of ``asa`` in blocks of a page that a shell is to run, in their order."""
    lines = "\n".join(block.findall(page.read_text())).replace("\\\n", " ").splitlines()
    split = (shlex.split(line, comments=True) for line in lines)
    return [words[1:] for words in split if words[:1] == ["asa"]]


def named(page: Path) -> list[list[str]]:
    """Commands inside sentences that leave nothing to be filled in."""
    return [
        shlex.split(text.partition(">")[0])[1:] for text in INLINE.findall(page.read_text()) if not OPEN.search(text)
    ]


def read(words: list[str], reader: Callable[[Verb, list[str]], object]) -> None:
    """Hand ``words`` behind the name of their verb to ``reader``; a family of commands, such as `asa launch`, has none.

    Raises:
        UsageError: there is no such command, or it does not understand its options.
    """
    for verb in verbs(words[0]):
        name = verb.name.split()
        if words[: len(name)] == name:
            reader(verb, words[len(name) :])
            return
    assert len(words) == 1, words


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_every_command_is_understood(page: Path) -> None:
    for words in (*commands(page), *commands(page, EXAMPLE)):
        read(words, lambda verb, rest: arguments(verb, rest, {}))
    for words in named(page):
        read(words, lambda verb, rest: parser(verb).parse_args(rest))


def test_the_screen_of_the_readme_is_what_is_printed(tmp_path: Path) -> None:
    page = (ROOT / "README.md").read_text()
    (words,) = commands(ROOT / "README.md")
    (screen,) = re.findall(r"^```\n(\w+ on 2 x cpu \(.*?)^```", page, re.M | re.S)
    printed = {line.rstrip() for line in asa(*words, cwd=tmp_path).stdout.splitlines()}
    shown = [line for line in screen.splitlines() if not line.startswith(("Proof", "Doubt"))]  # as the machine is busy
    assert len(shown) > 10
    assert [line for line in shown if line not in printed] == []


@pytest.mark.parametrize("name", ["quickstart", "concepts", "clusters"])
def test_a_walk_runs_as_it_is_written(name: str, tmp_path: Path) -> None:
    walk = commands(ROOT / "docs" / f"{name}.md")
    assert len(walk) >= 5
    for words in walk:
        asa(*words, cwd=tmp_path)


def test_the_program_of_the_page_trains_on_two_ranks(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    program = next(text for text in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "DataLoader(" in text)
    path = tmp_path / "program.py"
    path.write_text(program)
    device = replace(nouns.cluster(2).device, name=device_record(torch.device("cpu")).name)
    codec.save(replace(nouns.cluster(2), device=device), tmp_path / "profiles" / "cluster.here.json")  # links are known
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ASA_")}
    env = kept | {"XDG_CACHE_HOME": str(tmp_path)} | together(2)
    ranks = [rank_of(path, rank, env=env) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].err.read_text() + ranks[1].err.read_text()
    assert "measuring the links" not in ranks[0].err.read_text()
    losses = [float(x) for x in re.findall(r"^epoch \d: loss (\S+)$", ranks[0].out.read_text(), re.M)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert (tmp_path / "last.pt").is_file()


def test_the_pages_on_programs_can_be_taken_in_at_once() -> None:
    """At most 90 lines, and 800 words."""
    for name in ("python", "loop", "losses", "models", "parameters", "job"):
        text = (ROOT / "docs" / f"{name}.md").read_text()
        assert (len(text.splitlines()) <= 90, len(text.split()) <= 800) == (True, True), name


def test_the_studies_of_the_page_are_those_there_are() -> None:
    from asa.cli.commands import study_grid

    page = (ROOT / "docs" / "studies.md").read_text()
    assert re.findall(r"^\| `([a-z-]+)` \|", page, re.M) == list(study_grid.known())


def test_the_studies_of_the_page_can_be_foreseen_as_they_are_written(tmp_path: Path) -> None:
    walk = commands(ROOT / "docs" / "studies.md")
    assert len(walk) >= 2
    for words in walk:
        said = asa(*words, *(() if "--dry-run" in words else ("--dry-run",)), cwd=tmp_path).stdout
        assert "in all" in said
