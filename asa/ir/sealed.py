"""Predictions that are stored before anything is measured, in append-only files.

A file has one seal per line. Every seal contains the SHA-256 of its own content and of the previous seal. So none can
be changed, removed or inserted without breaking all later ones. A later prediction of the same cell is another seal
with a higher ``revision``; the earlier one stays.
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
"""The ``previous`` hash of the first seal in a file."""


@noun
class Claim:
    """Prediction for one cell: one model, batch and strategy on one kind of machine.

    ``plan`` is what runs (without the table of baselines), with its predicted step time, interval and memory. ``place``
    is its predicted place by speed among the ``among`` cells of its model and batch on this machine, 1 for the fastest.
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
        """Key that is equal for all predictions of one cell."""
        p = self.plan
        return (self.machine, p.model_spec, p.input_shape, p.num_classes, p.global_batch, p.precision, p.optimizer,
                self.strategy)  # fmt: skip

    @property
    def contest(self) -> tuple[object, ...]:
        """Key that is equal for cells that are compared with each other."""
        return self.key[:-1]


@noun
class Seal:
    """A stored claim. ``previous`` is the hash of the previous seal, ``sha256`` its own."""

    claim: Claim
    revision: int
    written: str
    asa_version: str
    previous: str
    sha256: str


def digest(content: dict[str, Any]) -> str:
    """SHA-256 of a seal's content without its own hash. It is computed from the data in the file, so it does not depend
    on the class that reads it."""
    stated = {k: v for k, v in content.items() if k != "sha256"}
    return hashlib.sha256(json.dumps(stated, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read(path: Path) -> list[Seal]:
    """Read all seals of a file, in order, and check every hash.

    Raises:
        InvalidInputError: a line is not a seal, or was changed, moved or removed.
    """
    text = read_text(path)
    seals: list[Seal] = []
    previous = FIRST
    for number, line in enumerate(text.splitlines(), 1):
        source = f"{path} line {number}"
        data = codec.parse(line, source=source)
        seal = codec.build(Seal, data, source=source)
        if seal.sha256 != digest(data):
            raise InvalidInputError(f"{source} was changed after it was sealed: its hash does not match its content")
        if seal.previous != previous:
            raise InvalidInputError(f"{source} does not follow the line before it: a seal was moved or removed")
        previous = seal.sha256
        seals.append(seal)
    return seals


def newest(seals: Iterable[Seal]) -> list[Seal]:
    """The latest prediction of every cell, in the order in which cells first appear."""
    latest: dict[tuple[object, ...], Seal] = {}
    for seal in seals:
        key = seal.claim.key
        if key not in latest or seal.revision >= latest[key].revision:
            latest[key] = seal
    return list(latest.values())


@noun
class CheckedCell:
    """A sealed prediction and its measurement. ``why_not`` says why there is no measurement."""

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
    """Sealed predictions compared with measurements on one machine. ``sealed`` is the number of all seals for the
    models and ``machines``."""

    created: str
    environment: BenchEnvironment
    sealed: int
    machines: tuple[str, ...]
    cells: tuple[CheckedCell, ...]
