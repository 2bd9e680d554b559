"""Refuses options that have no effect in combination with others, since the user expects an effect. Where that is
harmless, only a note is printed.

Options declare this themselves (``needs``, ``unless``, ``heeds`` of :class:`asa.cli.verb.Option`). Only flags on the
command line are checked: variables and files are for many commands.
"""

from __future__ import annotations

import logging

from asa.cli.verb import Arguments, Option, Verb
from asa.errors import UsageError

_LOG = logging.getLogger("asa")


def check(verb: Verb, args: Arguments) -> None:
    """Check that every given flag has an effect.

    Raises:
        UsageError: names the first that has none, and the option that causes it.
    """
    on = [o for o in verb.options if not _off(getattr(args, o.field))]
    for o in verb.options:
        if args.origin[o.field] != "flag":
            continue
        others = [p for p in on if p is not o and (p.field == o.unless or (p.heeds and o.field not in p.heeds))]
        if others:
            _idle(f"{o.shown} has no effect with {others[0].shown}", o, harmless=others[0].harmless)
        if not o.needs:
            continue
        other, values = _needed(verb, o)
        if values and getattr(args, other.field) not in values:
            has = f"{_setting(other)}{getattr(args, other.field)}"
            only = f"{_setting(other)}{' or '.join(values)}"
            _idle(f"{o.shown} has no effect with {has}, only with {only}", o, harmless=o.harmless)
        if not values and other not in on:
            raise UsageError(f"{o.shown} has no effect without {other.shown}; add that, or leave out {o.shown}")


def condition(verb: Verb, o: Option) -> str:
    """Text for the help of an option on when it has an effect; empty if its own text says so."""
    if o.unless:
        return f"not with --{o.unless.replace('_', '-')}"
    if not o.needs:
        return ""
    other, values = _needed(verb, o)
    return "" if other.shown in o.help else f"only with {_setting(other)}{' or '.join(values)}".rstrip()


def _idle(line: str, o: Option, *, harmless: bool) -> None:
    if not harmless:
        raise UsageError(f"{line}; leave out {o.shown}")
    _LOG.warning("%s", line)


def _off(value: object) -> bool:
    return value is None or value is False or value == ()  # 0 is the first rank


def _needed(verb: Verb, o: Option) -> tuple[Option, tuple[str, ...]]:
    """The option that ``o`` needs, and the values of which it needs one (empty: any)."""
    field, _, values = o.needs.partition("=")
    return next(p for p in verb.options if p.field == field), tuple(filter(None, values.split("|")))


def _setting(o: Option) -> str:
    """Name of the option as it stands before a value."""
    return "" if o.positional else f"{o.shown} "
