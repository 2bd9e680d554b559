"""Defines commands: a name, options as data, and a short function. Help, configuration and tests read the same data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asa.cli.console import Console

TRUE = ("1", "true", "yes", "on")
"""Values that switch an option on, in a variable or a file."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One argument of a command.

    ``parse`` converts the user's text to the value, or raises ValueError, whose message is shown. The text may come
    from the command line, from ``ASA_<NAME>`` or from a configuration file. A ``switch`` takes no value. A ``repeated``
    option collects a tuple. A positional one has no dashes.

    An option may have an effect only under conditions (:mod:`asa.cli.ineffective_options`) that name another option by
    ``field``. ``needs``: it is given (``"verify"``) or has a value (``"to=safetensors"``); ``unless``: it is not given.
    An option with ``heeds`` changes the command's work, and only the options listed there have an effect with it.
    ``harmless``: a note is printed instead of an error.
    """

    name: str
    help: str
    parse: Callable[[str], Any] = str
    default: Any = None
    metavar: str = ""
    choices: tuple[str, ...] = ()
    short: str = ""
    switch: bool = False
    repeated: bool = False
    positional: bool = False
    required: bool = False
    needs: str = ""
    unless: str = ""
    heeds: tuple[str, ...] = ()
    harmless: bool = False

    @property
    def field(self) -> str:
        """Its name as an attribute of :class:`Arguments`."""
        return self.name.replace("-", "_")

    @property
    def shown(self) -> str:
        """Its name as shown to people."""
        return (self.metavar or self.name.upper()) if self.positional else f"--{self.name}"

    @property
    def variable(self) -> str:
        """The environment variable for it."""
        return f"ASA_{self.field.upper()}"

    def value(self, text: str) -> Any:
        """Convert ``text`` to the option's value.

        Raises:
            ValueError: says what is wrong with it.
        """
        if self.switch:
            if text.lower() not in (*TRUE, "0", "false", "no", "off", ""):
                raise ValueError(f"{text!r} is neither true nor false")
            return text.lower() in TRUE
        if not text.strip() and self.parse is str:
            raise ValueError("an empty text is no value; leave it out")
        if "\0" in text:
            raise ValueError("a text has no null characters")
        if self.choices and text not in self.choices:
            raise ValueError(f"{text!r} is none of {', '.join(self.choices)}")
        return self.parse(text)


class Arguments:
    """Values of a command's options as attributes; their sources (``origin[field]``); the command words."""

    def __init__(self, values: dict[str, Any], origin: dict[str, str], words: tuple[str, ...] = ()) -> None:
        self.__dict__.update(values)
        self.origin, self.words = origin, words

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"this verb has no option {name!r}")

    def replace(self, **values: Any) -> None:
        """Set other values for some options."""
        self.__dict__.update(values)

    def given(self, name: str) -> bool:
        """Whether the option was set by anything other than its default."""
        return self.origin.get(name, "default") != "default"


@dataclass(frozen=True, kw_only=True)
class Verb:
    """A command: ``name`` may be two words (``cluster list``)."""

    name: str
    help: str
    run: Callable[[Arguments, Console], int | None]
    options: tuple[Option, ...] = ()
    details: str = ""
