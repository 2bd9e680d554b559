"""``asa schema``: the JSON Schema of a file that asa writes and reads."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

from asa.cli import options as o
from asa.cli.console import Console
from asa.cli.verb import Arguments, Option, Verb

FILES = {
    "plan": ("asa.ir.plan", "Plan"),
    "profile": ("asa.ir.profile", "Profile"),
    "cluster": ("asa.ir.cluster", "Cluster"),
    "bench": ("asa.ir.bench", "Bench"),
    "study": ("asa.ir.study", "Study"),
    "staleness": ("asa.ir.staleness", "Staleness"),
    "rehearsal": ("asa.ir.rehearsal", "Rehearsal"),
    "epochrecord": ("asa.ir.measurements", "EpochRecord"),
}
"""Kinds of documents with the module and class of each."""


def run(args: Arguments, console: Console) -> None:
    """Print the schema, which is made from the types."""
    schema = of(args.kind)
    if console.as_json:
        console.document({"kind": "schema", "of": args.kind, "schema": schema})
        return
    console.text(json.dumps(schema, indent=1))


def of(kind: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of documents of ``kind``."""
    from asa.ir import codec

    module, name = FILES[kind]
    return codec.schema(getattr(import_module(module), name))


VERBS = (
    Verb(
        name="schema",
        help="print the JSON Schema of a kind of file",
        run=run,
        options=(
            Option(
                name="kind",
                help=", ".join(FILES),
                positional=True,
                required=True,
                choices=tuple(FILES),
                metavar="KIND",
            ),
            o.JSON,
        ),
        details="The schema describes the file. `asa plan --json` can print more (alternatives, frontier).",
    ),
)
