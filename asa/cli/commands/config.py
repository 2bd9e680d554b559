"""``asa config show``: every setting, its value and its source."""

from __future__ import annotations

import os

from asa.cli import options as o
from asa.cli.console import Console
from asa.cli.verb import Arguments, Option, Verb
from asa.errors import UsageError
from asa.ir import codec


def run(args: Arguments, console: Console) -> None:
    """Resolve and show every option of every command, as without flags."""
    from asa.cli.settings import resolve
    from asa.cli.verbs import VERBS as WORDS
    from asa.cli.verbs import verbs
    from asa.report.text.tables import line, table

    rows = []
    chosen = [v for word in WORDS for v in verbs(word) if not args.verb or f"{v.name} ".startswith(f"{args.verb} ")]
    if not chosen:
        raise UsageError(f"{args.verb!r} is no command; see `asa --help`")
    for verb in chosen:
        options = [option for option in verb.options if not option.positional]
        resolved = resolve(Verb(name=verb.name, help="", run=verb.run, options=tuple(options)), {}, os.environ)
        rows += [(verb.name, opt.name, getattr(resolved, opt.field), resolved.origin[opt.field]) for opt in options]
    data = {
        "kind": "config",
        "settings": [{"verb": v, "name": n, "value": codec.to_data(x), "from": w} for v, n, x, w in rows],
    }
    shown = table("Settings", ("verb", "setting", "value", "from"), left=4)
    visible = [row for row in rows if args.all or row[3] != "default"]
    for verb_name, name, value, where in visible:
        text = ", ".join(map(str, value)) if isinstance(value, tuple) else "" if value is None else str(value)
        shown.add_row(verb_name, name, text, where)
    hidden = line(f"{len(rows) - len(visible)} settings have their defaults; --all shows them too")
    console.result(data, lambda: [*([shown] if visible else []), *([hidden] if len(visible) < len(rows) else [])])


VERBS = (
    Verb(
        name="config show",
        help="show settings from environment variables and files, and where each comes from",
        run=run,
        options=(
            Option(name="verb", help="only this command (default: all)", positional=True, metavar="VERB"),
            Option(name="all", help="show settings with their default value, too", switch=True),
            o.JSON,
        ),
        details="A value comes from the flag, else ASA_<NAME>, else asa.toml or [tool.asa] of pyproject.toml, "
        "else the default.",
    ),
)
