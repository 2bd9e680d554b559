"""``asa completion`` and ``asa schema``: both are made from the data that the commands themselves are made from."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from asa.cli import entry
from asa.cli.commands import completion, schema
from asa.cli.verbs import VERBS, verbs
from asa.ir import codec, shipped

EVERY = [verb for word in VERBS for verb in verbs(word)]
SCRIPTS = {"bash": completion.bash, "zsh": completion.zsh, "fish": completion.fish}


def completed(*line: str) -> list[str]:
    """What bash offers for the last word."""
    script = completion.bash(EVERY)
    words = " ".join(f"'{word}'" for word in line)
    asked = f"COMP_WORDS=({words}); COMP_CWORD={len(line) - 1}; _asa; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(
        ["bash", "--norc", "-c", f"{script}\n{asked}"], capture_output=True, text=True, check=True, cwd="/"
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        (("asa", "pl"), ["plan"]),
        (("asa", "plan", "--sol"), ["--solver"]),
        (("asa", "plan", "--solver", "d"), ["dp"]),
        (("asa", "plan", "--cluster", "a100-nvlink"), ["a100-nvlink-2", "a100-nvlink-8"]),
        (("asa", "cluster", "me"), ["measure", "media"]),
        (("asa", "cluster", "measure", "--j"), ["--json"]),
        (("asa", "bench", "--check"), ["--check-sealed"]),
        (("asa", "launch", "sl"), ["slurm"]),
    ],
)
def test_bash_completes(line, offered):
    found = completed(*line)
    assert found[0] == offered[0]
    assert set(found) <= set(offered)


@pytest.mark.parametrize("shell", SCRIPTS)
def test_every_command_option_and_choice_is_in_every_script(shell):
    script = SCRIPTS[shell](EVERY)
    for verb in EVERY:
        for word in verb.name.split():
            assert word in script
        for option in verb.options:
            if not option.positional:
                assert (f"-l {option.name}" if shell == "fish" else f"--{option.name}") in script
            assert " ".join(option.choices) in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_quotes_in_a_help_text_end_no_word():
    for shell in ("zsh", "fish"):
        for line in SCRIPTS[shell](EVERY).split("\n"):
            assert shell == "zsh" or line.count("'") % 2 == 0, line


@pytest.mark.parametrize("path", sorted(shipped.FOLDER.glob("*.json")), ids=lambda p: p.name)
def test_shipped_files_are_of_their_schema(path):
    document = json.loads(path.read_text())
    held(schema.of(document["kind"]), document)


def test_a_plan_is_of_its_schema_and_a_field_too_many_is_not():
    document = json.loads((Path(__file__).parent.parent / "docs" / "samples" / "plan.json").read_text())
    held(schema.of("plan"), document)
    with pytest.raises(AssertionError):
        held(schema.of("plan"), document | {"another": 1})
    with pytest.raises(AssertionError):
        held(schema.of("plan"), {k: v for k, v in document.items() if k != "stages"})


@pytest.mark.parametrize("kind", schema.FILES)
def test_every_kind_is_called_as_its_documents_are(kind, capsys):
    assert entry.run(["schema", kind]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["properties"]["kind"] == {"const": kind}
    assert found["properties"]["schema_version"] == {"const": codec.SCHEMA_VERSION}


def test_an_unknown_shell_or_kind_is_named_with_those_there_are(capsys):
    assert entry.run(["completion", "tcsh"]) == 2
    assert "none of bash, zsh, fish" in capsys.readouterr().err
    assert entry.run(["schema", "pla"]) == 2
    assert "plan, profile" in capsys.readouterr().err


def held(rules: dict, document: object, defs: dict | None = None) -> None:
    """``document`` has what a schema asks for and nothing else; of types, objects, arrays and references alone."""
    defs = rules.get("$defs", {}) if defs is None else defs
    if "$ref" in rules:
        rules = defs[rules["$ref"].rsplit("/", 1)[-1]]
    if "const" in rules:
        assert document == rules["const"]
    if rules.get("type") == "object" and "properties" in rules:
        assert isinstance(document, dict)
        assert set(rules.get("required", ())) <= document.keys()
        if rules.get("additionalProperties") is False:
            assert document.keys() <= rules["properties"].keys(), document.keys() - rules["properties"].keys()
        for name, value in document.items():
            held(rules["properties"][name], value, defs)
    if rules.get("type") == "array" and "items" in rules:
        assert isinstance(document, list)
        for value in document:
            held(rules["items"], value, defs)


LINES = [
    ("asa bench --stu", ["--study"]),
    ("asa bench --study hy", ["hybrid"]),
    ("asa cluster me", ["measure"]),
    ("asa plan --solver d", ["dp"]),
    ("asa comp", ["completion"]),
]


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish here")
def test_fish_completes(tmp_path):
    asked = "\n".join(f"complete -C '{line}'; echo @@" for line, _ in LINES)
    (tmp_path / "asked.fish").write_text(f"{completion.fish(EVERY)}\n{asked}\n")
    home = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        ["fish", "--no-config", str(tmp_path / "asked.fish")], capture_output=True, text=True, check=True, env=home
    )
    answers = [[row.split("\t")[0] for row in text.split("\n") if row] for text in done.stdout.split("@@\n")[:-1]]
    assert answers == [offered for _, offered in LINES]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh here")
def test_zsh_completes(tmp_path):
    """In a terminal of its own, as zsh completes nowhere else: what was asked for has to appear on its line."""
    (tmp_path / "script.zsh").write_text(completion.zsh(EVERY))
    setup = f"PS1=; autoload -Uz compinit; compinit -u -d {tmp_path}/dump; source {tmp_path}/script.zsh; print READ''Y"
    asked = [
        f"zpty -n -w z {line!r}$'\\t'; zpty -r -m z seen '*{' '.join([*line.split()[:-1], offered[0]])}*'; "
        "print done; zpty -n -w z $'\\C-u'"
        for line, offered in LINES
    ]
    (tmp_path / "type.zsh").write_text(
        "\n".join(
            [
                "zmodload zsh/zpty; zpty -b z zsh -f -i",
                f'zpty -w z "{setup}"',
                "zpty -r -m z seen '*READY*'",
                *asked,
                "zpty -d z",
            ]
        )
    )
    typing = ["zsh", "-f", str(tmp_path / "type.zsh")]
    done = subprocess.run(typing, capture_output=True, text=True, timeout=480, check=True)
    assert done.stdout.split() == ["done"] * len(LINES)
