"""Predictions written down before anybody measures them, in files that only grow.

A file holds a seal a line. Every seal carries the SHA-256 of its own content and of the seal in front of it, so that
none can be changed, taken out or put in between without breaking all behind it. A later prediction of the same cell is
a further seal of a higher ``revision``; the earlier one stays.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from asa.errors import InvalidInputError
from asa.ir import codec
from asa.ir.bench import BenchEnvironment
from asa.ir.codec import noun
from asa.ir.plan import Plan
from asa.ir.profile import Origin, Stat
from asa.reading import read_text

FIRST = "0" * 64
"""What the first seal of a file follows."""


@noun
class Claim:
    """What is foretold of one cell: one model, batch and strategy on one kind of machine.

    ``plan`` is what runs (without the table of baselines), with its predicted step time, interval and memory.
    ``place`` of ``among``: 1 is the one foretold to be the fastest of its model and batch on this machine.
    """

    machine: str
    device_name: str
    num_devices: int
    num_nodes: int
    strategy: str
    plan: Plan
    place: int
    among: int

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for predictions of the same cell."""
        p = self.plan
        return (self.machine, p.model_spec, p.input_shape, p.num_classes, p.global_batch, p.precision, p.optimizer,
                self.strategy)  # fmt: skip

    @property
    def contest(self) -> tuple[object, ...]:
        """Equal for cells that are compared with each other."""
        return self.key[:-1]


@noun
class Seal:
    """A claim as it was written down. ``previous`` is the hash of the seal in front, ``sha256`` its own."""

    claim: Claim
    revision: int
    written: str
    asa_version: str
    previous: str
    sha256: str


def digest(content: dict[str, Any]) -> str:
    """SHA-256 of a seal's content, its own hash left out: of what stands in the file, whatever noun reads it."""
    stated = {k: v for k, v in content.items() if k != "sha256"}
    return hashlib.sha256(json.dumps(stated, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sealed(claim: Claim, *, revision: int, written: str, asa_version: str, previous: str) -> str:
    """The line of a new seal."""
    content = {
        "claim": codec.to_data(claim),
        "revision": revision,
        "written": written,
        "asa_version": asa_version,
        "previous": previous,
    }
    return json.dumps({**content, "sha256": digest(content)}, separators=(",", ":"), allow_nan=False) + "\n"


def read(path: Path) -> list[Seal]:
    """All seals of a file, in order, every hash checked.

    Raises:
        InvalidInputError: a line that is no seal, or one that was changed, moved or taken out.
    """
    text = read_text(path)
    found: list[Seal] = []
    previous = FIRST
    for number, line in enumerate(text.splitlines(), 1):
        source = f"{path} line {number}"
        data = codec.parse(line, source=source)
        seal = codec.build(Seal, data, source=source)
        if seal.sha256 != digest(data):
            raise InvalidInputError(f"{source} was changed after it was sealed: its hash is not that of its content")
        if seal.previous != previous:
            raise InvalidInputError(f"{source} does not follow the line in front: a seal was moved or taken out")
        previous = seal.sha256
        found.append(seal)
    return found


def newest(seals: Iterable[Seal]) -> list[Seal]:
    """The last prediction of every cell, in the order of the first ones."""
    found: dict[tuple[object, ...], Seal] = {}
    for seal in seals:
        key = seal.claim.key
        if key not in found or seal.revision >= found[key].revision:
            found[key] = seal
    return list(found.values())


@noun
class CheckedCell:
    """A sealed prediction beside what was measured; ``why_not`` says why nothing was."""

    machine: str
    model: str
    strategy: str
    input_shape: tuple[int, ...]
    ranks: int
    global_batch: int
    origin: Origin
    sealed: str
    sha256: str
    predicted_s: float
    low_s: float
    high_s: float
    predicted_memory_bytes: int
    predicted_place: int
    measured: Stat | None
    peak_memory_bytes: int | None
    why_not: str = ""


@noun
class SealedCheck:
    """Sealed predictions against one machine. ``sealed`` counts all of the models asked for, for ``machines``."""

    created: str
    environment: BenchEnvironment
    sealed: int
    machines: tuple[str, ...]
    cells: tuple[CheckedCell, ...]
