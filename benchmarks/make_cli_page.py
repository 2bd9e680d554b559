"""Make ``docs/cli.md`` from the commands' own option data: ``python benchmarks/make_cli_page.py``. A test compares."""

from __future__ import annotations

import re
from pathlib import Path

from asa.cli.verb import Option, Verb
from asa.cli.verbs import VERBS, verbs

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
_HEAD = """# Commands

Every option can also be set by a variable (`--global-batch` by `ASA_GLOBAL_BATCH`) or in `asa.toml`, there for all
commands or in a table with the command's name. A flag wins over a variable, a variable over a file, a file over the
default. `asa config show` says where each value comes from. An option that would have no effect with the others is
refused with exit code 2.

| exit code | means |
|---|---|
| 0 | success |
| 1 | internal error, or `verify` found a difference |
| 2 | wrong usage |
| 3 | a file or model that cannot be used |
| 4 | no plan fits: the line names the limit that binds and the nearest remedy |
| 5 | the environment lacks something |
| 6 | a worker failed |
| 7 | no valid checkpoint |
| 75 | stopped on request, state saved |
| 130, 143 | interrupted; ended by SIGTERM where there was nothing to save |

`ASA_DEBUG=1` adds the traceback to an error's line.
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for word in VERBS:
        parts += [section(verb) for verb in verbs(word)]
    return "\n".join(parts)


def section(verb: Verb) -> str:
    """One command: what it does, and a row an option."""
    rows = [f"## asa {verb.name}", "", f"{verb.help[:1].upper()}{verb.help[1:]}.", ""]
    if verb.details:
        rows += [" ".join(verb.details.split()), ""]
    rows += ["| option | does | default |", "|---|---|---|"]
    return "\n".join([*rows, *(row(option) for option in verb.options), ""])


def row(option: Option) -> str:
    """One line of the table."""
    value = option.metavar or "|".join(option.choices) or option.name.upper()
    name = value if option.positional else option.shown if option.switch else f"{option.shown} {value}"
    told = re.search(r" \(default: ([^()]*(?:\([^()]*\)[^()]*)*)\)", option.help)  # in the user's words
    value = ", ".join(map(str, option.default)) if isinstance(option.default, tuple) else option.default
    default = told[1] if told else "" if value in (None, False, "") else str(value)
    cells = (f"`{name}`", option.help.replace(told[0], "") if told else option.help, default)
    return "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
