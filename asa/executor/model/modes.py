"""Training or evaluation mode of each module. Modules that a program keeps in evaluation (frozen BatchNorm) stay
there."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx, nn

from asa.tracing.component import TracedComponent


@dataclass(frozen=True, kw_only=True)
class Modes:
    """``training`` flag of every module, by path, for a model in training mode. Empty if all modules have the same
    mode."""

    training: dict[str, bool] = field(default_factory=dict)
    by_code: frozenset[str] = frozenset()
    """Paths of modules in evaluation mode whose own ``forward`` reads the mode."""

    @staticmethod
    def of(model: nn.Module) -> Modes:
        """The current modes of ``model``. Empty for a model that is in evaluation as a whole, because it has not been
        set to train yet."""
        modes = {path: m.training for path, m in model.named_modules() if path}
        if not model.training or all(modes.values()):
            return Modes()
        evaluating = [(path, m) for path, m in model.named_modules() if path and not m.training]
        return Modes(training=modes, by_code=frozenset(path for path, m in evaluating if _asks(m)))

    def restore(self, components: Sequence[TracedComponent]) -> None:
        """Set the modules of ``components`` back to the recorded modes. All of them are in training mode before."""
        for component in components:
            recorded = [p for p, _ in component.named_modules() if p in self.training]
            if not recorded:
                continue
            for path, module in component.named_modules():
                parts = path.split(".") if path else []
                prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
                nearest = next((p for p in prefixes if p in self.training), None)
                if nearest is not None:
                    module.training = self.training[nearest]
            # A component without any module in training mode runs its evaluation graph.
            component.training = any(self.training[p] for p in recorded)

    def check(self, components: Sequence[TracedComponent]) -> None:
        """Warn about modules in evaluation mode that tracing in training mode has split into single operations."""
        graphs = [c.train_graph.graph for c in components if isinstance(c.train_graph, fx.GraphModule)]
        called = {str(n.target) for graph in graphs for n in graph.nodes if n.op == "call_module"}
        split_up = [
            path
            for path in sorted(self.by_code)
            if not any(path == c or path.startswith(f"{c}.") for c in called)
            and any(c.training and any(p.startswith(path) for p, _ in c.named_modules()) for c in components)
        ]
        if split_up:
            warnings.warn(
                f"{split_up[0]} is in evaluation mode and reads its mode in forward, among layers in training mode: it "
                "runs as in training; set its probabilities to zero instead",
                stacklevel=2,
            )


def _asks(module: nn.Module) -> bool:
    if type(module).__module__.startswith("torch.nn"):
        return False
    try:
        return "training" in inspect.getsource(type(module).forward)
    except (OSError, TypeError):
        return False
