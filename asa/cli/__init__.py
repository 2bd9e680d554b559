"""The command line: parse, call, print. One module a verb; what is heavy is imported inside the verb."""

from __future__ import annotations


def main() -> None:
    """The console script ``asa``; ends the process with the exit code of :mod:`asa.errors`."""
    import sys

    from asa.cli.entry import run

    sys.exit(run(sys.argv[1:]))
