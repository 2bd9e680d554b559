"""All commands with their modules, each imported when it is called."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module

from asa.cli.verb import Verb
from asa.errors import UsageError

VERBS: dict[str, tuple[str, str]] = {
    "profile": ("asa.cli.profile", "time every component of a model on this machine"),
    "plan": ("asa.cli.plan", "choose how each component is spread over the devices"),
    "train": ("asa.cli.train", "train under a plan, checking it after every epoch"),
    "bench": ("asa.cli.bench", "the same training under every strategy, measured side by side"),
    "verify": ("asa.cli.verify", "is training under a plan numerically the same as on one device?"),
    "explain": ("asa.cli.explain", "why this plan, and why not another strategy"),
    "simulate": ("asa.cli.simulate", "the timeline of a plan, without running it"),
    "launch": ("asa.cli.launch", "a plan as a job for Slurm, Kubernetes or Ray"),
    "export": ("asa.cli.export", "trained weights, or the plan, for other tools"),
    "cluster": ("asa.cli.cluster", "list, show or measure devices and their links"),
    "doctor": ("asa.cli.doctor", "what this machine can do, and how to repair what it cannot"),
    "config": ("asa.cli.config", "show every setting and where its value comes from"),
    "schema": ("asa.cli.schema", "the JSON Schema of a file that asa writes and reads"),
    "completion": ("asa.cli.completion", "a script that completes commands in bash, zsh or fish"),
}
"""First word of each command, with its module and its line in the overview."""


def verbs(word: str) -> tuple[Verb, ...]:
    """The commands whose first word is ``word``.

    Raises:
        UsageError: there is none; names the most similar.
    """
    if word not in VERBS:
        near = get_close_matches(word, VERBS, n=1)
        hint = f"did you mean `asa {near[0]}`?" if near else f"there is {', '.join(VERBS)}"
        raise UsageError(f"{word!r} is no command; {hint}")
    found: tuple[Verb, ...] = import_module(VERBS[word][0]).VERBS
    return found
