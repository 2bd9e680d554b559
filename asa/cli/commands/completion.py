"""``asa completion``: a script that completes commands, options and their values in bash, zsh or fish.

It is made from the same option data as the help, and runs no other program during completion.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from asa.cli import options as o
from asa.cli.console import Console
from asa.cli.verb import Arguments, Option, Verb

SHELLS = ("bash", "zsh", "fish")


def run(args: Arguments, console: Console) -> None:
    """Print the script."""
    from asa.cli.verbs import VERBS as WORDS
    from asa.cli.verbs import verbs

    every = [verb for word in WORDS for verb in verbs(word)]
    text = {"bash": bash, "zsh": zsh, "fish": fish}[args.shell](every)
    console.text(text)
    console.document({"kind": "completion", "shell": args.shell, "text": text})


def flags(verb: Verb) -> list[str]:
    """All flags of a command, with dashes."""
    return [f for opt in verb.options if not opt.positional for f in (opt.short, f"--{opt.name}") if f]


def values(verb: Verb, option: Option) -> Sequence[str]:
    """Possible values of ``option``; empty if any text is accepted."""
    if option.name == "cluster":
        from asa.cost.machine import presets

        return presets.names()
    return () if verb.name == "plan" and option.positional else option.choices


def words(every: Sequence[Verb]) -> dict[str, list[str]]:
    """First words of commands, each with its second words, if any."""
    second_words: dict[str, list[str]] = {}
    for verb in every:
        first, *rest = verb.name.split()
        second_words.setdefault(first, []).extend(rest)
    return second_words


def bash(every: Sequence[Verb]) -> str:
    """Script for ``source <(asa completion bash)``; words without a rule are completed as files."""
    cases = []
    for verb in sorted(every, key=lambda v: -len(v.name.split())):
        rules = [
            f"      {'|'.join(f for f in (opt.short, f'--{opt.name}') if f)}) "
            f'COMPREPLY=($(compgen -W "{" ".join(values(verb, opt))}" -- "$cur")); return ;;'
            for opt in verb.options
            if not opt.positional and values(verb, opt)
        ]
        offered = [*flags(verb), *(v for opt in verb.options if opt.positional for v in values(verb, opt))]
        cases += [
            f'  "{verb.name} "*)',
            '    case "$prev" in',
            *rules,
            "    esac",
            f'    offered="{" ".join(offered)}" ;;',
        ]
    second = [f'    {first}) offered="{" ".join(rest)} $offered" ;;' for first, rest in words(every).items() if rest]
    return "\n".join(
        [
            "# bash completion of asa: source <(asa completion bash)",
            "_asa() {",
            '  local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" offered=""',
            '  if [ "$COMP_CWORD" = 1 ]; then',
            f'    COMPREPLY=($(compgen -W "{" ".join([*words(every), "--help", "--version"])}" -- "$cur")); return',
            "  fi",
            '  case "${COMP_WORDS[*]:1:COMP_CWORD-1} " in',
            *cases,
            "  esac",
            '  if [ "$COMP_CWORD" = 2 ]; then case "${COMP_WORDS[1]}" in',
            *second,
            "  esac; fi",
            '  COMPREPLY=($(compgen -W "$offered" -- "$cur"))',
            '  [[ "$cur" == -* ]] || COMPREPLY+=($(compgen -f -- "$cur"))',
            "}",
            "complete -o filenames -F _asa asa",
            "",
        ]
    )


def zsh(every: Sequence[Verb]) -> str:
    """Script for a file ``_asa`` in a folder of ``$fpath``, or ``source <(asa completion zsh)``."""
    top = [f"    '{first}:{_quoted(_help(first))}'" for first in words(every)]
    cases = []
    for verb in sorted(every, key=lambda v: -len(v.name.split())):
        specs = [f"      {spec}" for opt in verb.options for spec in _zsh_option(verb, opt)]
        cases += [f"    '{verb.name} '*)", f"      shift {len(verb.name.split())} words", "      _arguments \\"]
        cases += [f"{spec} \\" for spec in specs[:-1]] + specs[-1:] + ["      ;;"]
    second = [f"    ({first}) compadd {' '.join(rest)} ;;" for first, rest in words(every).items() if rest]
    return "\n".join(
        [
            "#compdef asa",
            "_asa() {",
            "  local -a commands=(",
            *top,
            "  )",
            "  if (( CURRENT == 2 )); then _describe command commands; return; fi",
            "  if (( CURRENT == 3 )); then case $words[2] in",
            *second,
            "  esac; fi",
            '  case "$words[2,CURRENT-1] " in',
            *[line.replace("shift 1 words", "shift words; (( CURRENT -= 1 ))").replace(
                "shift 2 words", "shift 2 words; (( CURRENT -= 2 ))") for line in cases],
            "  esac",
            "}",
            'if [ "$funcstack[1]" = _asa ]; then _asa "$@"; else compdef _asa asa; fi',
            "",
        ]
    )  # fmt: skip


def _zsh_option(verb: Verb, option: Option) -> list[str]:
    choices = values(verb, option)
    action = f"({' '.join(choices)})" if choices else "_files"
    if option.positional:
        return [f"'::{option.name}:{action}'"]
    many, description = "*" if option.repeated else "", f"[{_quoted(option.help)}]"
    argument = "" if option.switch else f":{option.name}:{action}"
    return [f"'{many}{flag}{description}{argument}'" for flag in (option.short, f"--{option.name}") if flag]


def fish(every: Sequence[Verb]) -> str:
    """Script for ``asa completion fish | source``, or a file in ``~/.config/fish/completions``."""
    lines = ["# fish completion of asa: asa completion fish | source"]
    for first, rest in words(every).items():
        described = _quoted(_help(first))
        lines.append(f"complete -c asa -n __fish_use_subcommand -f -a {first} -d '{described}'")
        if rest:
            condition = f"__fish_seen_subcommand_from {first}; and not __fish_seen_subcommand_from {' '.join(rest)}"
            lines.append(f"complete -c asa -n '{condition}' -f -a '{' '.join(rest)}'")
    for verb in every:
        condition = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in verb.name.split())
        rest = words(every).get(verb.name, [])
        condition += f"; and not __fish_seen_subcommand_from {' '.join(rest)}" if rest else ""
        for opt in verb.options:
            choices = " ".join(values(verb, opt))
            if opt.positional:
                lines += [f"complete -c asa -n '{condition}' -a '{choices}'"] if choices else []
                continue
            short = f" -s {opt.short.lstrip('-')}" if opt.short else ""
            argument = "" if opt.switch else f" -x -a '{choices}'" if choices else " -r"
            lines.append(f"complete -c asa -n '{condition}'{short} -l {opt.name}{argument} -d '{_quoted(opt.help)}'")
    return "\n".join([*lines, ""])


def _help(first: str) -> str:
    from asa.cli.verbs import VERBS as WORDS

    return WORDS[first][1]


def _quoted(text: str) -> str:
    """``text`` without characters that end a quoted description in zsh or fish."""
    return re.sub(r"['\"\[\]:\\`$]", "", text)


VERBS = (
    Verb(
        name="completion",
        help="a script that completes commands and options in bash, zsh or fish",
        run=run,
        options=(
            Option(
                name="shell", help="bash, zsh or fish", positional=True, required=True, choices=SHELLS,
                metavar="|".join(SHELLS),
            ),
            o.JSON,
        ),
        details="bash, and zsh after compinit: source <(asa completion bash). fish: asa completion fish | source.",
    ),
)  # fmt: skip
