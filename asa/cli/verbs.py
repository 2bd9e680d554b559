"""All commands with their modules, each imported when it is called."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module

from asa.cli.verb import Verb
from asa.errors import UsageError

VERBS: dict[str, tuple[str, str]] = {
    "profile": ("asa.cli.commands.profile", "measure every component of a model on this machine"),
    "plan": ("asa.cli.commands.plan", "choose a strategy for every component"),
    "train": ("asa.cli.commands.train", "train under a plan, and check its predictions"),
    "bench": ("asa.cli.commands.bench", "measure the same training under several strategies"),
    "verify": ("asa.cli.commands.verify", "check that a plan trains like one device"),
    "explain": ("asa.cli.commands.explain", "show where the time of a plan or of a run goes"),
    "simulate": ("asa.cli.commands.simulate", "show the timeline of a plan"),
    "launch": ("asa.cli.commands.launch", "write a job for Slurm, Kubernetes or Ray"),
    "export": ("asa.cli.commands.export", "write trained weights, or a plan for another tool"),
    "cluster": ("asa.cli.commands.cluster", "list, show or measure devices and their links"),
    "doctor": ("asa.cli.commands.doctor", "check this machine, and say how to repair it"),
    "config": ("asa.cli.commands.config", "show settings and where they come from"),
    "schema": ("asa.cli.commands.schema", "print the JSON Schema of a kind of file"),
    "completion": ("asa.cli.commands.completion", "print completion for bash, zsh or fish"),
}
"""First word of each command, with its module and its line in the overview."""


def verbs(word: str) -> tuple[Verb, ...]:
    """The commands whose first word is ``word``.

    Raises:
        UsageError: there is none; names the most similar.
    """
    if word not in VERBS:
        matches = get_close_matches(word, VERBS, n=1)
        hint = f"did you mean `asa {matches[0]}`?" if matches else f"there is {', '.join(VERBS)}"
        raise UsageError(f"{word!r} is no command; {hint}")
    commands: tuple[Verb, ...] = import_module(VERBS[word][0]).VERBS
    return commands
