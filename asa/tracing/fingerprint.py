"""Fingerprint of a traced model: names and shapes of its tensors and its computation, but not its weights.

The text is written here rather than taken from ``repr`` or from generated code. Those change between releases of torch,
and a profile must stay valid after an upgrade.
"""

from __future__ import annotations

import hashlib
from typing import Any

from torch import Tensor, fx, nn

from asa.tracing.component import TracedComponent
from asa.tracing.program import opened

_PLAIN = (bool, int, float, str, type(None))


def called(target: Any) -> str:
    """Name of what a node calls, equal in every release of torch."""
    if isinstance(target, str):
        return target
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', type(target).__name__)}"


def code(graph: fx.Graph) -> str:
    """Text with one line per node: what it calls, and on which inputs. It is equal for graphs that compute the same."""
    return "\n".join(f"{n.name} = {n.op} {called(n.target)} {n.args} {dict(n.kwargs)}" for n in graph.nodes)


def settings(module: nn.Module) -> str:
    """Class and plain attributes (strides, dropout rates) of a module."""
    plain = {
        k: v
        for k, v in sorted(vars(module).items())
        if not k.startswith("_")
        and k != "training"
        and (isinstance(v, _PLAIN) or (isinstance(v, tuple) and all(isinstance(e, _PLAIN) for e in v)))
    }
    return f"{type(module).__name__} {plain}"


def model_fingerprint(model: nn.Module, components: list[TracedComponent]) -> str:
    """Sixteen hex digits from the model's tensors (names, shapes, types), its modules' settings, and its cuts."""
    digest = hashlib.sha256()

    def add(line: str) -> None:
        digest.update(line.encode() + b"\n")

    tensors: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        add(f"{name} {tuple(tensor.shape)} {tensor.dtype}")
    for path, module in model.named_modules():
        if not opened(module):  # modules that tracing enters are described by the graphs below
            add(f"{path} {settings(module)}")
    for component in components:
        add(component.name)
        add(code(component.train_graph.graph))
        add(code(component.eval_graph.graph))
    return digest.hexdigest()[:16]
