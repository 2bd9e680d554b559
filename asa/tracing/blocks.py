"""Detection of a model's repeated blocks (bottlenecks, encoder layers), and descriptions of the segments between
cuts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx, nn

from asa.tracing.cuts import Cut
from asa.tracing.program import Program, opened, origin, plain_container

_TORCH_BLOCKS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


@dataclass(frozen=True)
class Segment:
    """The part of a model between two consecutive cuts.

    Attributes:
        paths: modules whose code runs here.
        heavy: those of them with parameters of their own, except norms; a parameter used directly counts as one.
        norms: normalization layers among them.
        crossing_bytes: bytes per sample of the tensor that leaves at the end.
        exit: path of the module that computes that tensor.
    """

    paths: frozenset[str]
    heavy: tuple[str, ...]
    norms: tuple[str, ...]
    crossing_bytes: int
    exit: str

    def touches(self, path: str) -> bool:
        """Whether any code of the module at ``path`` runs here."""
        return any(within(p, path) for p in self.paths)


def within(path: str, ancestor: str) -> bool:
    """Whether ``path`` is ``ancestor`` or lies below it."""
    return path == ancestor or path.startswith(ancestor + ".") or not ancestor


def is_norm(module: object) -> bool:
    """Whether ``module`` is a normalization layer: its class name contains "norm"."""
    return isinstance(module, nn.Module) and "norm" in type(module).__name__.lower()


def describe(nodes: Iterable[fx.Node], programs: Iterable[Program], end: Cut | None) -> Segment:
    """Description of the nodes between two cuts (of both modes together); ``end`` is None after the last cut."""
    objects = {target: item for program in programs for target, item in program.attributes.items()}
    paths: set[str] = set()
    heavy: dict[str, None] = {}
    norms: dict[str, None] = {}

    def note(target: str, item: object) -> None:
        (norms if is_norm(item) else heavy)[target] = None

    for node in nodes:
        paths.add(origin(node).path)
        called = objects[str(node.target)] if node.op == "call_module" else None
        if called is not None and next(called.parameters(), None) is not None:
            note(str(node.target), called)
        for source in node.all_input_nodes:
            if source.op == "get_attr" and isinstance(objects[str(source.target)], nn.Parameter):
                note(str(source.target), None)
    return Segment(
        frozenset(paths),
        tuple(heavy),
        tuple(norms),
        crossing_bytes=end.bytes_per_sample if end else 0,
        exit=origin(end.node).path if end else "",
    )


def _outermost(model: nn.Module, root: str, opaque: set[str]) -> list[str]:
    """Modules with parameters whose class occurs at least twice in ``model``, searched below ``root`` through
    containers and wrappers of a unique class."""
    instances = Counter(type(m) for m in model.modules())
    blocks: list[str] = []

    def walk(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            below = f"{path}.{name}" if path else name
            if not opened(child) and not isinstance(child, _TORCH_BLOCKS):
                continue
            wrapper = plain_container(child) or isinstance(child, nn.TransformerEncoder) or instances[type(child)] < 2
            if not wrapper and next(child.parameters(), None) is not None:
                blocks.append(below)
            elif wrapper and below not in opaque:
                walk(child, below)

    walk(model.get_submodule(root), root)
    return blocks


def _knots(path: str, segments: list[Segment]) -> list[Segment]:
    """Segments, out of ``segments``, that contain several layers with parameters, all inside the module at ``path``,
    which no cut separates."""
    layers = [(s, (*s.heavy, *s.norms)) for s in segments]
    return [s for s, names in layers if len(names) > 1 and all(within(layer, path) for layer in names)]


def find_blocks(model: nn.Module, segments: list[Segment], opaque: set[str]) -> list[str]:
    """Paths of the repeated blocks of ``model``.

    Candidates are the outermost modules, below containers and wrappers of a unique class, whose class occurs at least
    twice. A candidate that only chains smaller candidates is replaced by them. Classes in which some layers cannot be
    separated (a skip connection, branches) have priority. Plain chains (convolution, norm, activation) count as blocks
    only if there are no others.
    """

    def innermost(path: str) -> list[str]:
        parts, knots = _outermost(model, path, opaque), _knots(path, segments)
        inside = all(any(all(within(h, p) for h in (*s.heavy, *s.norms)) for p in parts) for s in knots)
        if path in opaque or not knots or not inside or len(parts) < 2:
            return [path]
        return [inner for part in parts for inner in innermost(part)]

    paths = [inner for path in _outermost(model, "", opaque) for inner in innermost(path)]
    kinds = {p: type(model.get_submodule(p)) for p in paths}
    tied = {kinds[p] for p in paths if p in opaque or issubclass(kinds[p], _TORCH_BLOCKS) or _knots(p, segments)}
    return [p for p in paths if kinds[p] in (tied or set(kinds.values()))]


def attends(model: nn.Module) -> bool:
    """Whether the model contains attention, by the class names of its modules."""
    return any("attention" in type(m).__name__.lower() or isinstance(m, _TORCH_BLOCKS) for m in model.modules())
