"""Makes a traced model's randomness a function of seed, step and sample, by replacing every dropout in its graphs for
training and evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch.nn.functional as F
from torch import fx, nn

from asa.sharding.collectives.axis import SOLO
from asa.sharding.layers.modules import HeadParallelAttention
from asa.sharding.layers.propagate import Cut, splits_by_heads
from asa.sharding.randomness import attention, recurrent
from asa.sharding.randomness.attention import with_masks_by_sample
from asa.sharding.randomness.recurrent import drops_between_layers, with_layers_by_sample
from asa.sharding.randomness.samples import (
    BySample,
    SampleAlphaDropout,
    SampleContext,
    SampleDropout,
    SampleRReLU,
    replacement,
)
from asa.sharding.stock import stock
from asa.tracing.component import TracedComponent


def make_reproducible(components: Iterable[TracedComponent], context: SampleContext) -> None:
    """Replace dropout modules, dropout functions and attention dropout by forms that read ``context``.

    Modules that fx could not enter are searched too. Dropout of a tensor whose first dimension is not the batch is not
    replaced. A dropout module that is called several times draws anew in each call, like the stock module, and each
    call is a site of its own. If a dropout works in place, later readers of its input see the change: code that fx
    could not enter reads the input itself, and a graph reads the dropout's result.
    """
    for component in components:
        for graph in component.graphs():
            _read_results(graph)
        if component.eval_graph is not component.train_graph:  # a shared graph also drops in evaluation, which is kept
            _replace_functions(component.train_graph, component.name, context)
        for graph in component.graphs():
            _separate_calls(graph, component.name, context)
        for path, child in list(component.named_modules()):
            new: nn.Module | None = replacement(child, f"{component.name}.{path}", context)
            if isinstance(child, nn.MultiheadAttention) and child.dropout > 0 and stock(child):
                new = _attention(component, child, path, context)
                if new is None and not any(splits_by_heads(child, n) for n in _calls(component, path)):
                    dropout = SampleDropout(child.dropout, site=f"{path}.weights", context=context)
                    with_masks_by_sample(child, dropout)
            if drops_between_layers(child):
                dropout = SampleDropout(child.dropout, site=path, context=context)
                with_layers_by_sample(child, dropout, f"{component.name}.{path}")
            if new is not None:
                if isinstance(new, SampleDropout) and not _calls(component, path):
                    new.inplace = bool(getattr(child, "inplace", False))
                component.set_submodule(path, new.train(child.training))


def put_back(model: nn.Module) -> None:
    """Undo :func:`make_reproducible` in a copy of a model, which is called with samples that no context knows."""
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(vars(module).get("forward"), attention.BySample | recurrent.BySample):
            del vars(module)["forward"]
        original = module.as_original() if isinstance(module, BySample) else None
        if original is not None:
            model.set_submodule(path, original)


def _read_results(module: fx.GraphModule) -> None:
    nodes = list(module.graph.nodes)
    changing = [n for n in nodes if _drops_in_place(module, n)]
    for node in changing:
        later = nodes[nodes.index(node) + 1 :]
        _dropped_from(node).replace_all_uses_with(node, delete_user_cb=later.__contains__)
    if changing:
        module.recompile()


def _drops_in_place(module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        called = module.get_submodule(str(node.target))
        return isinstance(called, nn.modules.dropout._DropoutNd) and called.inplace
    in_place = node.kwargs.get("inplace", node.args[3] if len(node.args) > 3 else False)
    return node.op == "call_function" and node.target in _FUNCTIONS and node.target is not F.rrelu and bool(in_place)


def _dropped_from(node: fx.Node) -> fx.Node:
    return cast(fx.Node, node.args[0] if node.args else node.kwargs["input"])


_Factory = Callable[..., BySample]


def _dropping(kind: type[SampleDropout], *, whole_from: int | None, trains: bool) -> Callable[..., _Factory | None]:
    def make(input: object, p: float = 0.5, training: bool = trains, inplace: bool = False) -> _Factory | None:
        del input, inplace
        return partial(kind, float(p), whole_from=whole_from) if training else None

    return make


def _sloping(
    input: object, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> _Factory | None:
    del input
    return partial(SampleRReLU, lower, upper, inplace=inplace) if training else None


_FUNCTIONS: dict[Any, Callable[..., _Factory | None]] = {
    F.dropout: _dropping(SampleDropout, whole_from=None, trains=True),
    F.dropout1d: _dropping(SampleDropout, whole_from=2, trains=True),
    F.dropout2d: _dropping(SampleDropout, whole_from=2, trains=True),
    F.dropout3d: _dropping(SampleDropout, whole_from=2, trains=True),
    F.alpha_dropout: _dropping(SampleAlphaDropout, whole_from=None, trains=False),
    F.feature_alpha_dropout: _dropping(SampleAlphaDropout, whole_from=2, trains=False),
    F.rrelu: _sloping,
}
"""Functions that return the replacement for a function of torch, given its arguments; None if the call draws
nothing."""


def _replace_functions(module: fx.GraphModule, owner: str, context: SampleContext) -> None:
    calls = [n for n in module.graph.nodes if n.op == "call_function" and n.target in _FUNCTIONS]
    drawing = [(n, make) for n in calls if (make := _FUNCTIONS[n.target](*n.args, **n.kwargs)) is not None]
    for i, (node, make) in enumerate(drawing):
        path, site = f"dropout_{i}", f"{owner}.dropout_{i}"
        module.add_submodule(path, make(site=site, context=context))
        with module.graph.inserting_before(node):
            call = module.graph.call_module(path, (_dropped_from(node),))
        node.replace_all_uses_with(call)
        module.graph.erase_node(node)
    if drawing:
        module.recompile()


def _separate_calls(module: fx.GraphModule, owner: str, context: SampleContext) -> None:
    calls: Counter[str] = Counter()
    for node in [n for n in module.graph.nodes if n.op == "call_module"]:
        target = str(node.target)
        call, calls[target] = calls[target], calls[target] + 1
        path = f"{target.replace('.', '_')}_call_{call}"
        stock = module.get_submodule(target)
        new = replacement(stock, f"{owner}.{target}#{call}", context) if call else None
        if new is not None:
            module.add_submodule(path, new.train(stock.training))
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
