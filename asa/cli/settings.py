"""Sources of a value: the flag, else ``ASA_<NAME>``, else a configuration file, else the default.

The file is ``asa.toml`` in the working directory, or ``[tool.asa]`` of a ``pyproject.toml`` there. A key at its top
applies to every command with such an option; a table named like a command (``[plan]``, ``[cluster.measure]``) applies
to that command and overrides the top.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from asa.cli import ineffective_options
from asa.cli.console import reaching_stdout
from asa.cli.verb import TRUE, Arguments, Option, Verb
from asa.cli.verbs import VERBS, verbs
from asa.errors import InvalidInputError, UsageError
from asa.reading import read_text


class _Formatter(argparse.HelpFormatter):
    """Formats help in two columns, 80 characters wide; words with hyphens, such as options, are not broken."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        joined = " ".join(text.split())
        return textwrap.fill(joined, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


_VALUELESS = re.compile(r"argument (\S+): expected one argument")
"""What argparse says of an option without a value. To argparse, ``-5GB`` is another option."""


class _Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one-line UsageErrors."""

    def error(self, message: str) -> NoReturn:
        if valueless := _VALUELESS.fullmatch(message):
            flag = valueless[1].rpartition("/")[2]
            raise UsageError(
                f"{flag} needs a value; one that begins with a dash follows an equals sign, as in {flag}=-1; "
                f"see `{self.prog} --help`"
            )
        raise UsageError(f"{message[:1].lower()}{message[1:]}{self._suggestion(message)}; see `{self.prog} --help`")

    def print_help(self, file: Any = None) -> None:
        """Print the help text; unlike argparse's own, not in silence if it cannot be written."""
        with reaching_stdout():
            sys.stdout.write(self.format_help())
            sys.stdout.flush()

    def _suggestion(self, message: str) -> str:
        """Suggestion of flags that are similar to unknown ones."""
        unknown = [word[2:] for word in message.split() if word.startswith("--")] if "unrecognized" in message else []
        names = [flag[2:] for flag in self._option_string_actions if flag.startswith("--")]
        parts = {word: [n for n in names if word in n.split("-")] for word in unknown}
        matches = [f"--{match}" for word in unknown for match in get_close_matches(word, names, n=1) or parts[word]]
        return f"; did you mean {', '.join(matches)}?" if matches else ""


def parser(verb: Verb) -> argparse.ArgumentParser:
    """The argparse parser of one command; values stay text and are absent unless given."""
    command = _Parser(
        prog=f"asa {verb.name}",
        usage=_usage(verb),
        description=f"{verb.help[:1].upper()}{verb.help[1:]}.",
        epilog=verb.details or None,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=_Formatter,
    )
    for o in verb.options:
        if o.positional:
            command.add_argument(o.field, help=_help(verb, o), metavar=o.metavar or o.name.upper(), nargs="?")
            continue
        flags = [f for f in (o.short, f"--{o.name}") if f]
        if o.switch:
            command.add_argument(*flags, dest=o.field, help=_help(verb, o), action="store_true")
        else:
            command.add_argument(
                *flags,
                dest=o.field,
                help=_help(verb, o),
                metavar=o.metavar or ("|".join(o.choices) if o.choices else o.name.upper()),
                action="append" if o.repeated else "store",
            )
    return command


def _usage(verb: Verb) -> str:
    """The usage line of a command, with its positional arguments; options are listed below it."""
    positionals = [o.shown if o.required else f"[{o.shown}]" for o in verb.options if o.positional]
    return " ".join([f"asa {verb.name}", *positionals, "[options]"])


def arguments(verb: Verb, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Arguments:
    """All options of ``verb`` with their values.

    Raises:
        UsageError: an error on the command line or in an environment variable.
        InvalidInputError: an error in the configuration file.
    """
    flags = vars(parser(verb).parse_args(list(argv)))
    args = resolve(verb, flags, os.environ if environment is None else environment, words=tuple(argv))
    ineffective_options.check(verb, args)
    return args


def misspelt(verb: Verb, environment: Mapping[str, str]) -> list[str]:
    """A sentence on every variable ``ASA_...`` that sets no option of any command, and is similar to one that does."""
    unknown = [n for n in environment if n.startswith("ASA_") and n not in {o.variable for o in verb.options}]
    if not unknown:
        return []
    variables = {o.variable for word in VERBS for v in verbs(word) for o in v.options if not o.positional}
    matches = {n: get_close_matches(n, variables, n=1, cutoff=0.8) for n in unknown if n not in variables}
    return [f"{name} sets no option; did you mean {match[0]}?" for name, match in matches.items() if match]


def resolve(
    verb: Verb, flags: Mapping[str, Any], environment: Mapping[str, str], *, words: tuple[str, ...] = ()
) -> Arguments:
    """Values of all options: from flags, then environment, then file, then defaults."""
    path, table = configuration(Path.cwd())
    from_file = _for_verb(table, verb)
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for o in verb.options:
        if o.field in flags:
            values[o.field], origin[o.field] = _value(o, flags[o.field], o.shown), "flag"
        elif not o.positional and o.variable in environment:
            values[o.field], origin[o.field] = _value(o, environment[o.variable], o.variable), f"env {o.variable}"
        elif not o.positional and o.name in from_file:
            raw, location = from_file[o.name]
            try:
                values[o.field] = _value(o, raw, o.name)
            except UsageError as error:
                raise InvalidInputError(f"{path}: {error}", where=location) from None
            origin[o.field] = f"file {path}"
        elif o.required:
            raise UsageError(f"{o.metavar or o.name} is missing; see `asa {verb.name} --help`")
        else:
            values[o.field], origin[o.field] = (() if o.repeated and o.default is None else o.default), "default"
    return Arguments(values, origin, words)


def wants_json(argv: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether output is to be a document; needed before the command is known, because errors are documents then, too.

    Help is never a document. An unreadable configuration file is ignored here and refused by the command.
    """
    if not argv or argv[0] == "help" or {"--help", "-h", "--version", "-V"} & {*argv}:
        return False
    if "--json" in argv:
        return True
    setting: Any = environment.get("ASA_JSON")
    if setting is None:
        try:
            table: Any = configuration(Path.cwd())[1]
        except (InvalidInputError, OSError):
            return False
        for word in ("", *argv[:2]):
            table = table.get(word) if word and isinstance(table, dict) else table
            setting = table.get("json", setting) if isinstance(table, dict) else setting
    return str(setting).lower() in TRUE


def configuration(folder: Path) -> tuple[Path | None, dict[str, Any]]:
    """Path and content of the configuration file in a folder; (None, {}) if there is none.

    Raises:
        InvalidInputError: the file is not TOML.
    """
    for path, inside in ((folder / "asa.toml", ()), (folder / "pyproject.toml", ("tool", "asa"))):
        if not os.path.lexists(path):
            continue
        try:
            table: Any = tomllib.loads(read_text(path))
        except (ValueError, RecursionError) as error:  # of TOML, or of a number of thousands of digits
            raise InvalidInputError(f"{path.name}: {error}") from None
        for key in inside:
            table = table.get(key, {}) if isinstance(table, dict) else {}
        if isinstance(table, dict) and table:
            return Path(path.name), _dashed(table)
    return None, {}


def _dashed(table: Mapping[str, Any]) -> dict[str, Any]:
    """``table`` with dashes in place of underscores in its keys.

    Raises:
        InvalidInputError: two keys differ only in these.
    """
    renamed: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("_", "-")
        if name in renamed:
            raise InvalidInputError(f"configuration: {name} is given twice, with '-' and with '_'", where=f"$.{key}")
        renamed[name] = value
    return renamed


def _for_verb(table: Mapping[str, Any], verb: Verb) -> dict[str, tuple[Any, str]]:
    """Values of a command's options by name, each with its location in the file."""
    section: Any = table
    for word in verb.name.split():
        section = section.get(word, {}) if isinstance(section, dict) else {}
    top = {k: v for k, v in table.items() if not isinstance(v, dict)}
    options = _dashed(section) if isinstance(section, dict) else {}
    names = {o.name for o in verb.options if not o.positional}
    if any(key not in names for key in top) or len(top) < len(table):
        _check_names(table, verb)
    for key in options:
        if key not in names:
            raise InvalidInputError(f"[{verb.name.replace(' ', '.')}] has no option {key!r}", where=f"$.{key}")
    inside = verb.name.replace(" ", ".")
    return {k: (v, f"$.{k}") for k, v in top.items()} | {k: (v, f"$.{inside}.{k}") for k, v in options.items()}


def _check_names(table: Mapping[str, Any], verb: Verb) -> None:
    """Check that every key at the top of a configuration file is an option of a command, and every table a command.

    Raises:
        InvalidInputError: names the one that is not, and the most similar name.
    """
    every = [verb, *(v for word in VERBS for v in verbs(word))]
    words, options = {v.name.split()[0] for v in every}, {o.name for v in every for o in v.options if not o.positional}
    for key, value in table.items():
        inside = isinstance(value, dict)
        names = words if inside else options
        if key not in names:
            matches = get_close_matches(key, names, n=1)
            hint = f"; did you mean {matches[0]}?" if matches else ""
            what = f"no command is called {key!r}" if inside else f"no command has an option {key!r}"
            raise InvalidInputError(f"configuration: {what}{hint}", where=f"$.{key}")
        seconds = [v.name.split()[1] for v in every if v.name.startswith(f"{key} ")]
        for second in value if inside and seconds else ():
            if second not in seconds:
                what = f"[{key}] has a table for {', '.join(seconds)}, and none called {second!r}"
                raise InvalidInputError(f"configuration: {what}", where=f"$.{key}.{second}")


def _value(o: Option, raw: Any, where: str) -> Any:
    if o.switch and isinstance(raw, bool):
        return raw
    texts = [_text(o, v, where) for v in raw] if isinstance(raw, list) else [_text(o, raw, where)]
    try:
        if o.repeated:
            return tuple(o.value(t) for t in texts)
        value = o.value(",".join(texts))
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None
    if isinstance(raw, list) and not isinstance(value, tuple):
        raise UsageError(f"{where}: a list of {len(raw)}, where one value is needed")
    return value


def _text(o: Option, raw: Any, where: str) -> str:
    """A value of a configuration file as a user would have typed it; its type must fit the option."""
    numeric = isinstance(raw, int | float) and not isinstance(raw, bool)
    if not isinstance(raw, str) and not (numeric and (o.switch or o.parse is not str)):
        kinds = {bool: "true or false", dict: "a table", list: "a list", int: "a number", float: "a number"}
        raise UsageError(f"{where}: {kinds.get(type(raw), type(raw).__name__)} is no value for it")
    return str(raw)


def _help(verb: Verb, o: Option) -> str:
    shown = ", ".join(map(str, o.default)) if isinstance(o.default, tuple) else o.default
    default = f"default: {shown}" if shown not in (None, "") and not o.switch and "default" not in o.help else ""
    added = "; ".join(filter(None, (default, ineffective_options.condition(verb, o))))
    if added:
        added = f"; {added})" if o.help.endswith(")") else f" ({added})"
    return (o.help.removesuffix(")" if added.startswith(";") else "") + added).replace("%", "%%")
