"""Make a traced model's randomness a function of seed, step and sample: every dropout replaced, in both graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch.nn.functional as F
from torch import fx, nn

from asa.sharding.attention import with_masks_by_sample
from asa.sharding.axis import SOLO
from asa.sharding.modules import HeadParallelAttention
from asa.sharding.propagate import Cut, splits_by_heads
from asa.sharding.samples import SampleContext, SampleDropout, replacement
from asa.sharding.stock import stock
from asa.tracing.component import TracedComponent


def make_reproducible(components: Iterable[TracedComponent], context: SampleContext) -> None:
    """Replace dropout modules, functions and attention dropout by forms that read ``context``.

    Modules fx could not look into (leaves with dropout inside) are searched too; recurrent layers with dropout
    keep their own, as does what drops from a tensor whose first dimension is not the batch. A dropout module that is
    called several times draws anew in each call, as the stock one does: each call is a site of its own.
    """
    for component in components:
        if component.eval_graph is not component.train_graph:  # else they drop in evaluation too, and go on doing that
            _replace_functions(component.train_graph, component.name, context)
        for graph in component.graphs():
            _separate_calls(graph, component.name, context)
        for path, child in list(component.named_modules()):
            fresh: nn.Module | None = replacement(child, f"{component.name}.{path}", context)
            if isinstance(child, nn.MultiheadAttention) and child.dropout > 0 and stock(child):
                fresh = _attention(component, child, path, context)
                if fresh is None and not any(splits_by_heads(child, n) for n in _calls(component, path)):
                    dropout = SampleDropout(child.dropout, site=f"{path}.weights", context=context)
                    with_masks_by_sample(child, dropout)
            if fresh is not None:
                component.set_submodule(path, fresh.train(child.training))


_FUNCTIONS: dict[Any, int | None] = {F.dropout: None, F.dropout2d: 2}
"""The first dimension that shares one decision, of functions (input, p, training)."""


def _replace_functions(module: fx.GraphModule, owner: str, context: SampleContext) -> None:
    functions = [n for n in module.graph.nodes if n.op == "call_function" and n.target in _FUNCTIONS and _drops(n)]
    for i, node in enumerate(functions):
        p = float(node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5))
        path, site = f"dropout_{i}", f"{owner}.dropout_{i}"
        module.add_submodule(path, SampleDropout(p, site=site, context=context, whole_from=_FUNCTIONS[node.target]))
        with module.graph.inserting_before(node):
            call = module.graph.call_module(path, (node.args[0] if node.args else node.kwargs["input"],))
        node.replace_all_uses_with(call)
        module.graph.erase_node(node)
    if functions:
        module.recompile()


def _drops(node: fx.Node) -> bool:
    return bool(node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True))


def _separate_calls(module: fx.GraphModule, owner: str, context: SampleContext) -> None:
    calls: Counter[str] = Counter()
    for node in [n for n in module.graph.nodes if n.op == "call_module"]:
        target = str(node.target)
        call, calls[target] = calls[target], calls[target] + 1
        path = f"{target.replace('.', '_')}_call_{call}"
        stock = module.get_submodule(target)
        fresh = replacement(stock, f"{owner}.{target}#{call}", context) if call else None
        if fresh is not None:
            module.add_submodule(path, fresh.train(stock.training))
            node.target = path
    if any(count > 1 for count in calls.values()):
        module.recompile()


def _calls(component: TracedComponent, path: str) -> list[fx.Node]:
    return [n for g in component.graphs() for n in g.graph.nodes if n.op == "call_module" and n.target == path]


def _attention(
    component: TracedComponent, source: nn.MultiheadAttention, path: str, context: SampleContext
) -> nn.Module | None:
    calls = _calls(component, path)
    if not calls or not all(splits_by_heads(source, n) for n in calls):
        return None
    dropout = SampleDropout(source.dropout, site=f"{path}.weights", context=context)
    cut = Cut(2, source.num_heads, source.head_dim)
    return HeadParallelAttention(source, cut, SOLO, dropout)
