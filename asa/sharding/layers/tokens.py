"""Sequence parallelism: how a component splits if tokens, too, are divided over the tensor axis.

Between its pairs of split layers, tensor parallelism leaves a value whole. Here a rank has some of its tokens
(dimension 1 of [samples, tokens, width]), and norms, residuals and dropout work on those. Before a split layer tokens
are gathered, and their partial gradient is reduce-scattered. After a pair the partial output is reduce-scattered, and
its gradient gathered (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", 4.2.2).

The component's input is split by tokens, and so is its output, if it still has them. For operations that need all
tokens (the choice of the class token) they are gathered first.
"""

from __future__ import annotations

import operator

from torch import fx, nn

from asa.sharding.layers.propagate import (
    BINARY_FUNCTIONS,
    ELEMENTWISE_FUNCTIONS,
    Action,
    Cut,
    SplitPlan,
    Walk,
    is_elementwise,
    splits_by_heads,
)
from asa.sharding.stock import stock


class _TokenWalk(Walk):
    """The walk of tensor parallelism, with values split by tokens where they would be whole."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        (entry,) = [n for n in module.graph.nodes if n.op == "placeholder"]
        shape = entry.meta["tensor_meta"].shape
        self.entry = entry
        self.cut = Cut(1, int(shape[1]), tokens=True) if len(shape) == 3 else None
        self._heads: set[fx.Node] = set()

    def _visit(self, node: fx.Node) -> Cut | None:
        if node is self.entry:
            return self.cut
        if node.op == "output" or not node.users:  # an output may stay cut; an unused value needs nothing
            return None
        return super()._visit(node)

    def _column(self, node: fx.Node, path: str, cut: Cut, action: Action) -> Cut:
        if self._cut_of(node.args[0]) is None:
            return super()._column(node, path, cut, action)
        self.plan.actions[path], self.plan.cuts[path] = action, cut
        self.plan.gathered.setdefault(node.args[0], []).append(node)  # type: ignore[arg-type]
        return cut

    def _visit_module(self, node: fx.Node) -> Cut | None:
        path = str(node.target)
        m = self.module.get_submodule(path)
        cut = self._cut_of(node.args[0] if node.args else None)
        if cut is None or not cut.tokens:
            return self._scattered(node, super()._visit_module(node))
        if not stock(m):
            self._gather_inputs(node)
            return None
        if path not in self.repeated and "tensor_meta" in node.meta:
            if isinstance(m, nn.Linear):
                units = self._groups(node, m.out_features)
                return self._column(node, path, Cut(2, units, m.out_features // units), "column")
            if isinstance(m, nn.LayerNorm | nn.RMSNorm) and len(m.normalized_shape) == 1:
                self.plan.tokenwise.append(node)
                return cut
            if splits_by_heads(m, node) and m.batch_first:
                self._column(node, path, Cut(2, int(m.num_heads), int(m.head_dim)), "heads")  # type: ignore[arg-type]
                self.plan.scattered.append(node)
                self._heads.add(node)
                return None
        if is_elementwise(m):
            return cut
        self._gather_inputs(node)
        return None

    def _scattered(self, node: fx.Node, cut: Cut | None) -> Cut | None:
        """The cut of the output of a row-split layer: by tokens, if it has them."""
        if self.cut is None or node not in self.plan.reduced:
            return cut
        shape = node.meta["tensor_meta"].shape
        if len(shape) != 3 or shape[1] != self.cut.units:
            return cut
        if self.plan.actions.get(str(node.target)) != "row":
            return cut
        self.plan.reduced.remove(node)
        self.plan.scattered.append(node)
        return self.cut

    def _visit_function(self, node: fx.Node) -> Cut | None:
        source = node.args[0] if node.args else None
        if node.target is operator.getitem and source in self._heads:
            return self.cut if node.args[1] == 0 else None
        cut = self._cut_of(source)
        if cut is None or not cut.tokens or node.target in ELEMENTWISE_FUNCTIONS:
            return super()._visit_function(node)
        return self._binary(node) if node.target in BINARY_FUNCTIONS else None

    def _gather_inputs(self, node: fx.Node) -> None:
        if node.target != "dim":  # a part has the same number of dimensions
            super()._gather_inputs(node)

    def _hoist(self) -> None:
        """Accept the plan only if the output is one value, split by tokens or whole, and no split layer reads or makes
        a whole value. Nothing is partial at input and output."""
        plan, cut = self.plan, self.cut
        (output,) = [n for n in self.module.graph.nodes if n.op == "output"]
        ends = [plan.states.get(n) for n in output.all_input_nodes]
        inside = plan.readers or plan.reduced or any(not c.tokens for c in plan.gathers.values())
        if cut is not None and ends in ([cut], [None]) and plan.actions and not inside:
            plan.tokens, plan.exit_tokens = cut.units, cut.units if ends == [cut] else 0


def propagate_tokens(module: fx.GraphModule) -> SplitPlan:
    """How ``module`` (one tensor in, shapes propagated) splits over an axis that divides its tokens, for any degree.
    ``tokens`` of the result is 0 if it does not."""
    return _TokenWalk(module).run()
