"""Constants of the cost model. They live in ``asa/data/constants.json``, each with its unit and source."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from asa.errors import InvalidInputError
from asa.ir import codec
from asa.ir.codec import noun


@noun
class Constant:
    """A constant with its value, its unit and its source."""

    value: float
    unit: str
    source: str


@cache
def everything() -> dict[str, Constant]:
    """All constants by name."""
    path = files("asa").joinpath("data", "constants.json")
    found = codec.parse(path.read_text(encoding="utf-8"), source="asa/data/constants.json")
    for name, entry in found.items():
        if set(entry) != {"value", "unit", "source"}:
            raise InvalidInputError(f"constant {name} needs value, unit and source", where=f"$.{name}")
    return {name: Constant(**{**entry, "value": float(entry["value"])}) for name, entry in found.items()}


def constant(name: str) -> float:
    """The value of the constant called ``name``; KeyError where there is none."""
    return everything()[name].value
