"""Merges segments into named components: one per repeated block, and as few as sensible around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from asa.tracing.blocks import Segment, within


@dataclass(frozen=True)
class Unit:
    """Segments ``start`` to ``stop - 1``, which run as one component."""

    start: int
    stop: int
    name: str


def _ancestor(paths: list[str]) -> str:
    """Longest dotted path that contains all of ``paths``; the first of them if that is the root."""
    atoms = [p.split(".") for p in paths]
    shared = []
    for level in zip(*atoms, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return ".".join(shared) or paths[0]


def _block_units(segments: list[Segment], blocks: list[str]) -> list[Unit]:
    """One unit per block. Blocks that share a segment share a unit, named after the block in which it ends."""
    spans = []
    for path in blocks:
        at = [i for i, s in enumerate(segments) if s.touches(path)]
        if at:
            spans.append((at[0], at[-1] + 1, path))
    units: list[Unit] = []
    members: list[str] = []
    for start, stop, path in sorted(spans):
        if not units or start >= units[-1].stop:
            members = [path]
            units.append(Unit(start, stop, path))
            continue
        members.append(path)
        stop = max(stop, units[-1].stop)
        leaving = [m for m in members if within(segments[stop - 1].exit, m)]
        units[-1] = Unit(units[-1].start, stop, leaving[0] if leaving else _ancestor(members))
    return units


def _between(start: int, stop: int, segments: list[Segment], group: Callable[[str], str]) -> list[Unit]:
    """Units for the segments of a gap that have parameters, one per group. Norms join a group that has other layers
    with parameters."""
    units: list[Unit] = []
    for i in range(start, stop):
        heavy = segments[i].heavy
        if not heavy:
            continue
        name = group(_ancestor(list(heavy)))
        if units and units[-1].name == name:
            units[-1] = Unit(units[-1].start, i + 1, name)
        else:
            units.append(Unit(i, i + 1, name))
    grown = []
    for position, unit in enumerate(units):
        low = units[position - 1].stop if position else start
        high = units[position + 1].start if position + 1 < len(units) else stop
        norms = [i for i in range(low, high) if any(group(n) == unit.name for n in segments[i].norms)]
        grown.append(Unit(min([unit.start, *norms]), max([unit.stop, *(i + 1 for i in norms)]), unit.name))
    return grown


def _close_gaps(units: list[Unit], segments: list[Segment]) -> list[Unit]:
    """``units``, extended over the segments between them. Each gap is divided where the fewest bytes cross, as late as
    possible."""
    closed: list[Unit] = []
    start = 0
    for position, unit in enumerate(units):
        stop = len(segments)
        if position + 1 < len(units):
            choices = range(unit.stop, units[position + 1].start + 1)
            stop = min(choices, key=lambda end: (segments[end - 1].crossing_bytes, -end))
        closed.append(Unit(start, stop, unit.name))
        start = stop
    return closed


def _join_linears(units: list[Unit], segments: list[Segment], model: nn.Module) -> list[Unit]:
    """Join the linear layers of one ``Sequential`` into one unit, unless the model consists of that Sequential."""

    def home(unit: Unit) -> str | None:
        heavy = [h for s in segments[unit.start : unit.stop] for h in s.heavy]
        parents = {h.rpartition(".")[0] for h in heavy}
        modules = dict(model.named_modules())
        if len(parents) != 1 or not all(isinstance(modules.get(h), nn.Linear) for h in heavy):
            return None
        parent = parents.pop()
        return parent if parent and type(modules[parent]) is nn.Sequential else None

    homes = [home(u) for u in units]
    if len(set(homes)) == 1:
        return units
    joined: list[Unit] = []
    last: str | None = None
    for unit, where in zip(units, homes, strict=True):
        if where is not None and where == last:
            joined[-1] = Unit(joined[-1].start, unit.stop, where)
        else:
            joined.append(unit)
        last = where
    return joined


def _unique(units: list[Unit]) -> list[Unit]:
    used: set[str] = set()
    named = []
    for unit in units:
        name, n = unit.name, 1
        while name in used:
            n += 1
            name = f"{unit.name}-{n}"
        used.add(name)
        named.append(Unit(unit.start, unit.stop, name))
    return named


def _around(blocks: list[Unit], paths: list[str], segments: list[Segment], ends: tuple[str, str]) -> list[Unit]:
    def group(path: str) -> str:  # the outermost module around ``path`` that holds no block
        atoms = path.split(".")
        prefixes = [".".join(atoms[:n]) for n in range(1, len(atoms) + 1)]
        return next((p for p in prefixes if not any(within(b, p) for b in paths)), path)

    units: list[Unit] = []
    first, last = blocks[0].start, blocks[-1].stop
    if any(s.heavy for s in segments[:first]):
        units.append(Unit(0, first, ends[0]))
    for i, block in enumerate(blocks):
        units.append(block)
        if i + 1 < len(blocks):
            units += _between(block.stop, blocks[i + 1].start, segments, group)
    behind = [i for i in range(last, len(segments)) if segments[i].heavy]
    if behind:
        units.append(Unit(behind[0], len(segments), ends[1]))
    return units


def merge(model: nn.Module, segments: list[Segment], blocks: list[str], ends: tuple[str, str]) -> list[Unit]:
    """Units that cover ``segments`` without gap or overlap.

    ``blocks``: module paths of the repeated blocks; ``ends``: names of what precedes the first of them and of what
    follows the last. Segments without parameters, and norms, go to a neighbour. A model that becomes one unit is called
    ``model``.
    """
    around = _block_units(segments, blocks)
    if around:
        units = _around(around, blocks, segments, ends)
    else:
        units = _between(0, len(segments), segments, lambda path: path)
        units = _join_linears(units, segments, model)
    if len(units) < 2:
        return [Unit(0, len(segments), "model")]
    return _unique(_close_gaps(units, segments))


def join_shared(units: list[Unit], parameters: list[set[int]]) -> list[Unit]:
    """``units``, with ranges that share a parameter merged. ``parameters`` are their identities, per unit. A merged
    range keeps the name of its first unit."""
    joined: list[Unit] = []
    groups: list[set[int]] = []
    for unit, ids in zip(units, parameters, strict=True):
        start = next((i for i, other in enumerate(groups) if other & ids), len(joined))
        merged = set(ids).union(*groups[start:])
        first = joined[start] if start < len(joined) else unit
        joined[start:] = [Unit(first.start, unit.stop, first.name)]
        groups[start:] = [merged]
    return joined
