"""Losses that are not a plain mean over samples: known denominators are corrected, other losses are tested once.

``cross_entropy`` with class weights or ignored targets divides by the total weight of a rank's own targets; one device
divides by that of all targets. Autograd's node of the loss contains targets and weights, so the denominator is known.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from math import isclose
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from asa.api.losses.bends import bends, sides
from asa.api.losses.tape import Watched
from asa.api.losses.trial import Trial
from asa.api.messages import say
from asa.api.patching import replace_once
from asa.api.rank_context import RankContext
from asa.api.steps.distributed_model_base import DistributedModelBase
from asa.api.steps.in_step import BACKWARD
from asa.api.steps.registrations import watched_models
from asa.api.tensors.parameter_tools import is_part
from asa.errors import UsageError
from asa.executor.model.votes import Votes
from asa.sharding.collectives import direct
from asa.sharding.layers.modules import shards_of
from asa.sharding.split import TensorPart

_MARK, _OF_CALL = "asa", "asa_weight"
"""Keys in a node's metadata: the model whose output it is; weight and rows of this rank in the call it comes from."""
_MOST_NODES, _MOST_TERMS = 2048, 8
"""Largest number of autograd nodes searched below a loss, and of cross-entropies searched for."""
_MEANS, _MEAN = ("NllLossBackward0", "NllLoss2DBackward0"), 1


class Terms:
    """The cross-entropies in a loss, whose means are weighted by their targets over all ranks."""

    def __init__(self, votes: Votes) -> None:
        self._votes = votes
        self._counting: bool | None = None
        self._warned = self._warned_of_means = False

    @property
    def counting(self) -> bool:
        """Whether a cross-entropy of the program has another denominator than its number of samples."""
        return bool(self._counting)

    def count(self) -> None:
        """Weigh cross-entropies by their targets from now on (on all ranks)."""
        self._counting = True

    def tell_of_means(self, context: RankContext) -> None:
        """Print once that ``asa.reduce`` does not give the mean of such a loss over the batch."""
        if not self._warned_of_means:
            self._warned_of_means = True
            say(context, "the loss divides by its targets (weights, ignored ones), and asa.reduce(x) weighs the mean "
                "of a rank by its samples: for the loss of the whole batch, divide asa.reduce(loss_sum, 'sum') by "
                "asa.reduce(weight, 'sum')")  # fmt: skip

    def before(self, nodes: list[Any], weight: float, rows: int) -> Callable[[], None]:
        """Prepare a backward through ``nodes``; every rank calls this. ``weight``: weight of this rank's mean in the
        last call of the model; ``rows``: number of its samples. Call the returned function after the backward."""
        if self._counting is None:
            odd = len(nodes) > 0 and any(_differs_from_rows(node, rows) for node in nodes)
            self._counting = self._votes.anyone(odd)
        if not self._counting:
            if not self._warned and any(denominator_of(n) != n._saved_target.numel() for n in nodes):
                self._warned = True
                warnings.warn(
                    "targets are ignored by the loss for the first time now: from here on a rank's mean counts by its "
                    "samples, not by its targets, which one device would do; have some ignored in the first batch, or "
                    "use asa.mean_over(loss_sum, count)",
                    stacklevel=5,
                )
            return lambda: None
        weights = [0.0] * (1 + _MOST_TERMS)
        weights[0] = float(len(nodes)) + (0.5 if _each_of_a_sample(nodes, rows) else 0.0)
        of_calls = [weight if (call := node.metadata.get(_OF_CALL)) is None else call[0] for node in nodes]
        for i, node in enumerate(nodes[:_MOST_TERMS]):
            weights[1 + i] = denominator_of(node) if of_calls[i] else 0.0
        by_rank = self._votes.gather(weights)
        # A rank without counted samples may have computed something else, such as 0 * outputs. Means of single samples
        # (the boxes of each image) are weighed by samples.
        if (
            any(f[0] % 1 for f in by_rank)
            or len({f[0] for f in by_rank if f[0]}) > 1
            or not nodes
            or len(nodes) > _MOST_TERMS
        ):
            return lambda: None
        handles = []
        for i, node in enumerate(nodes):
            total = sum(f[1 + i] for f in by_rank)
            if total > 0 and of_calls[i]:
                factor = weights[1 + i] * self._votes.num_ranks / (total * of_calls[i])
                # Without counted targets a rank's mean is 0/0; it contributes nothing to the batch's loss.
                handles += [n.register_prehook(_times(factor)) for n in (node, *_smoothing(node))]
        if not all(weights[1 : 1 + len(nodes)]):
            for node, own_weight, of_call in zip(nodes, weights[1:], of_calls, strict=False):
                if not own_weight and of_call:
                    handles += [n.register_hook(_nothing) for n in (node, *_smoothing(node))]

        def after() -> None:
            for handle in handles:
                handle.remove()

        return after


class LearningModel(DistributedModelBase):
    """A distributed model whose losses are weighed by :class:`Terms` and compared by
    :class:`asa.api.losses.trial.Trial`; both are None for a single rank."""

    trial: Trial | None
    terms: Terms | None


def _times(factor: float) -> Callable[[Any], Any]:
    return lambda gradients: tuple(None if g is None else g * factor for g in gradients)


def _nothing(inputs: Any, _outputs: Any) -> Any:
    return tuple(None if g is None else torch.zeros_like(g) for g in inputs)


_SMOOTHED = ("DivBackward0", "SumBackward0", "MaskedFillBackward0", "NegBackward0", "SumBackward1")
_TAKING = (
    "LogSoftmax",
    "Index",
    "T",
    "Transpose",
    "Permute",
    "View",
    "UnsafeView",
    "Unsqueeze",
    "Select",
    "Slice",
    "Alias",
)
"""Beginnings of the names of nodes that take something of a sample, or give it another form."""
_MOST_BETWEEN = 12
"""Largest number of these between a cross-entropy and a batch."""
_RELATED, _FOLLOWED = "asa_beside", "AliasBackward0"
"""Key in a node's metadata for related nodes; name of the node that a recorded tensor gets
(:mod:`asa.api.losses.tape`)."""
_PRODUCTS = ("MulBackward", "DivBackward")
_LINEAR = (*_PRODUCTS, *(f"{name}Backward" for name in ("Add", "Sub", "Neg", "Stack", "Sum", "Alias")))
"""Nodes of sums and of multiples, without the number at the end."""
_GATHERED = "_ToTorchTensorBackward"
"""Name of the node at which ``full_tensor()`` makes a plain tensor of a sharded one."""
_MADE_WHOLE = ("_ValueWithGradientBackward", "_WholeWithGradientBackward")
"""Names of nodes below which a rank has a part of a tensor, and above which all ranks have the same."""


def _smoothing(node: Any) -> list[Any]:
    """The division nodes that label smoothing adds to a cross-entropy; they have the same denominator."""
    divided_by, related = denominator_of(node), node.metadata.get(_RELATED, ())
    return [n for n in related if isclose(float(n._saved_other), divided_by, rel_tol=1e-5)]


def _smoothed(node: Any) -> Any:
    """The log-softmax node under ``node``, if ``node`` is the mean over classes of label smoothing; otherwise None."""
    for name in _SMOOTHED:
        if node is None or node.name() != name:
            return None
        node = node.next_functions[0][0]
    return node.next_functions[0][0] if node is not None and node.name() == "MulBackward0" else node


def mark_output(output: Tensor, model: LearningModel) -> None:
    """Mark ``output`` in autograd's graph as one of the last call of ``model``; if it is a loss, the search continues
    below it."""
    node: Any = output.grad_fn
    if node is not None:
        node.metadata[_MARK] = (ref(model), not output.dim(), (model.mean_weight, model.mean_rows))


class LossGraph(NamedTuple):
    """What was found in the graph of a loss."""

    model: LearningModel | None
    """The distributed model from which it comes, with the weight and the rows of the call, if it is a single one."""
    terms: list[Any]
    """Nodes of mean ``nll_loss`` and ``cross_entropy`` on the way to the model, in a fixed order."""
    form: int
    """A number for the form of the graph."""
    leaves: list[tuple[Any, int]]
    """Where leaves enter beside the outputs: a node, and which of its inputs."""
    sides: tuple[int, ...]
    """On which sides of bends numbers of the batch are."""
    gathered: list[Any]
    """Nodes at which sharded tensors were made whole (``full_tensor()``) beside the outputs."""
    bare: list[Tensor]
    """Leaves beside the outputs that enter as this rank has them, and not as a part of a whole tensor."""


def search_graph(roots: Iterable[Tensor]) -> LossGraph:
    """What the graph of ``roots`` contains outside of models."""
    pending: deque[Any] = deque(
        (r.grad_fn, None, False) for r in roots if isinstance(r, Tensor) and r.grad_fn is not None
    )
    visited: set[Any] = set()
    calls: set[tuple[float, int]] = set()
    model: LearningModel | None = None
    terms: list[Any] = []
    names: list[str] = []
    related: dict[Any, list[Any]] = {}
    leaves: list[tuple[Any, int]] = []
    gathered: list[Any] = []
    bending: list[Any] = []
    bare: list[Tensor] = []
    while pending and (len(visited) < _MOST_NODES or model is None):
        node, call, whole = pending.popleft()
        if node is None or node in visited:
            continue
        visited.add(node)
        marked = node.metadata.get(_MARK)
        if marked is not None:
            model, call = model or marked[0](), marked[2]
            calls.add(call)
            if not marked[1]:
                continue
        names.append(node.name())
        if bends(names[-1]):
            bending.append(node)
        if is_mean_cross_entropy(node):
            terms.append(node)
            node.metadata[_OF_CALL] = call
        elif names[-1] == _SMOOTHED[0] and (of := _smoothed(node)) is not None:
            related.setdefault(of, []).append(node)
        elif call is None and names[-1] == _GATHERED and _is_whole(node.dtensor_spec):
            gathered.append(node)
        whole = whole or names[-1] in _MADE_WHOLE
        for i, (following, _) in enumerate(node.next_functions):
            pending.append((following, call, whole))
            if call is None and hasattr(following, "variable"):
                leaves.append((node, i))
                bare += [] if whole else [following.variable]
    for term in terms if related else ():
        term.metadata[_RELATED] = related.get(term.next_functions[0][0], [])
    for term in terms:
        if term.metadata[_OF_CALL] is None:
            found = calls if len(calls) == 1 else _calls_below(term)
            term.metadata[_OF_CALL] = next(iter(found)) if len(found) == 1 else None
    if model is not None and len(calls) == 1:  # the model may have been called for something else since
        model.__dict__.update(zip(("mean_weight", "mean_rows"), *calls, strict=True))
    on = sides(bending, lambda node: _below([node], stop_at_outputs=True)) if bending else ()
    form = hash((tuple(n for n in names if n != _FOLLOWED), on))
    return LossGraph(model, terms, form, leaves, on, gathered, bare)


def _is_whole(spec: Any) -> bool:
    """Whether every rank has all of a tensor with this ``DTensorSpec``."""
    return all(isinstance(placement, Replicate) for placement in spec.placements)


def whole_parameters(model: LearningModel) -> tuple[list[nn.Parameter], set[int]]:
    """The parameters that all ranks have whole, and whose gradients a backward averages over all of them; identities of
    the others that ranks have whole, in components with a layout of their own."""
    parallel = model.parallel
    if parallel is None:
        return [], set()
    if model.__dict__.get("whole_parameters", (None,))[0] is not parallel:
        averaged: list[nn.Parameter] = []
        others: set[int] = set()
        for component, layout in zip(parallel.components, parallel.layouts, strict=True):
            split = shards_of(component) if layout.tensor > 1 else {}
            whole = [p for n, p in component.named_parameters() if n not in split and not isinstance(p, DTensor)]
            if layout.data == model.rank_context.ranks:
                averaged += whole
            else:
                others.update(map(id, whole))
        model.__dict__["whole_parameters"] = parallel, averaged, others
    return model.__dict__["whole_parameters"][1:]  # type: ignore[no-any-return]


def _weigh_beside(model: LearningModel, leaves: list[tuple[Any, int]]) -> list[Any]:
    """Weigh gradients of whole parameters that a loss uses beside the outputs of ``model`` by this rank's weight, if
    outputs are weighed. Where they are not averaged afterwards, they are here. Returns handles to remove afterwards."""
    if not leaves or model.parallel is None or model.rank_context.ranks == 1:
        return []
    averaged, others = whole_parameters(model)
    ids = set(map(id, averaged)) if model.output_factor != 1 else set()
    weigh, average = _times_at(model.output_factor), _averaged_at(model)
    handles = []
    for node, at in leaves:
        of = id(node.next_functions[at][0].variable)
        if of in ids or of in others:
            handles.append(node.register_hook((weigh if of in ids else average)(at)))
    return handles


def _warn_of_parts(model: LearningModel, bare: list[Tensor]) -> None:
    """Warn once if parameters that are ``bare`` in a loss are parts, got from a module of ``model.modules()``."""
    if not model.__dict__.get("lent_parts") or not any(map(is_part, bare)):
        return
    model.__dict__["lent_parts"] = False
    warnings.warn(
        "the loss is computed from a parameter of model.modules(), of which this rank has a part: a norm, a mean or a "
        "product of it is that of the part; use model.named_parameters(), whose tensors look whole",
        stacklevel=4,
    )


def _times_at(factor: float) -> Callable[[int], Callable[[Any, Any], Any]]:
    return lambda at: (
        lambda inputs, _outputs: tuple(g * factor if i == at and g is not None else g for i, g in enumerate(inputs))
    )


def _averaged_at(model: LearningModel) -> Callable[[int], Callable[[Any, Any], Any]]:
    factor = model.output_factor / model.rank_context.ranks

    def mean(gradient: Tensor) -> Tensor:
        total = (gradient * factor).contiguous()
        direct.all_reduce(total, group=dist.group.WORLD)
        return total

    return lambda at: (
        lambda inputs, _outputs: tuple(mean(g) if i == at and g is not None else g for i, g in enumerate(inputs))
    )


def _average_gathered(model: LearningModel, gathered: list[Any]) -> list[Any]:
    """Average gradients of sharded tensors that a loss uses whole, weighted like outputs: every rank has the gradient
    of its own samples, of which torch would keep the part of its shard. Returns handles to remove afterwards."""
    if model.parallel is None or model.rank_context.ranks == 1:
        return []
    average = _averaged_at(model)(0)
    return [node.register_prehook(lambda grads: average(grads, None)) for node in gathered]


def _below(roots: Iterable[Any], *, stop_at_outputs: bool) -> Iterator[Any]:
    """Autograd's nodes ``roots`` and those below them, each once, and not too many. With ``stop_at_outputs`` none
    below an output of a model."""
    pending, visited = [*roots], set[Any]()
    while pending and len(visited) < _MOST_NODES:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        yield node
        if not stop_at_outputs or _MARK not in node.metadata:
            pending.extend(following for following, _ in node.next_functions)


def _calls_below(node: Any) -> set[tuple[float, int]]:
    """Weights and rows of the calls of models from whose outputs ``node`` is computed."""
    return {n.metadata[_MARK][2] for n in _below([node], stop_at_outputs=True) if _MARK in n.metadata}


def is_mean_cross_entropy(node: Any) -> bool:
    """Whether autograd's ``node`` is that of a cross-entropy that divides by the weight of its targets."""
    return bool(node.name() in _MEANS and node._saved_reduction == _MEAN)


def denominator_of(node: Any) -> float:
    """What a mean cross-entropy divides by, according to its ``node``."""
    return float(node._saved_total_weight)


def denominator_of_sum(loss: Tensor) -> float | None:
    """What ``loss`` divides by if it is a sum of multiples of mean cross-entropies of the same targets (smoothed, those
    of auxiliary heads) and nothing else; otherwise None."""
    terms: list[Any] = []
    smoothing: list[Any] = []
    pending = [loss.grad_fn]
    while pending and len(terms) + len(smoothing) <= _MOST_TERMS:
        node: Any = pending.pop()
        if node is None:
            return None
        if is_mean_cross_entropy(node):
            terms.append(node)
        elif _smoothed(node) is not None:
            smoothing.append(node)
        else:
            found = [following for following, _ in node.next_functions if following is not None]
            name = node.name().rstrip("01")
            if name not in _LINEAR or (name in _PRODUCTS and len(found) != 1):
                return None
            pending += found
    if pending or not terms or not all(_divide_alike(terms[0], other) for other in terms[1:]):
        return None
    below = [term.next_functions[0][0] for term in terms]
    divided_by = denominator_of(terms[0])
    if all(_smoothed(n) in below and isclose(float(n._saved_other), divided_by, rel_tol=1e-5) for n in smoothing):
        return divided_by
    return None


def _divide_alike(one: Any, other: Any) -> bool:
    """Whether two mean cross-entropies divide by the weight of the same targets."""
    targets = [node._saved_target.flatten() for node in (one, other)]
    return (
        one._saved_ignore_index == other._saved_ignore_index
        and torch.equal(*targets)
        and (one._saved_weight is None) == (other._saved_weight is None)
        and (one._saved_weight is None or torch.equal(one._saved_weight, other._saved_weight))
    )


def _each_of_a_sample(nodes: list[Any], rows: int) -> bool:
    """Whether there is a cross-entropy for each of ``rows`` samples, which were taken out of a batch one by one. With
    ``rows`` targets each, they may be of time steps."""
    if len(nodes) != rows or all(node._saved_target.numel() == rows for node in nodes):
        return False
    return all(_of_one_sample(node, rows) for node in nodes)


def _of_one_sample(node: Any, rows: int) -> bool:
    for _ in range(_MOST_BETWEEN):
        node = next((following for following, _ in node.next_functions if following is not None), None)
        name = "" if node is None else node.name()
        if name == "UnbindBackward0":
            return node._saved_dim == 0 and len(node._input_metadata) == rows
        if name == "SelectBackward0" and node._saved_dim == 0:
            return int(node._saved_self_sym_sizes[0]) == rows
        if name.partition("Backward")[0] not in _TAKING:
            return False
    return False


def _differs_from_rows(node: Any, rows: int) -> bool:
    targets = node._saved_target
    return node._saved_weight is not None or targets.numel() != rows or denominator_of(node) != targets.numel()


def _other_batches(model: LearningModel) -> None:
    """Let gradients of a batch in evaluation mode that is not the loader's be averaged; print a note once."""
    if model.parallel is not None:
        model.parallel.reduction.begin()
    if not model.warned_of_other_batches and model.rank_context.ranks > 1:
        model.__dict__["warned_of_other_batches"] = True
        warnings.warn(
            "gradients are taken in evaluation of other samples than the loader yielded last: the mean of every rank "
            "counts alike, however many samples it is of, and whether the loss is a mean over samples was not checked",
            stacklevel=4,
        )


def _check_no_layers(roots: list[Tensor]) -> None:
    """Check that a loss of a batch that no call of a distributed model is in does not go through layers of one.

    Raises:
        UsageError: it does. Ranks do not add up such gradients.
    """
    models = [m.parallel for m in watched_models() if m.parallel is not None and m.rank_context.ranks > 1]
    own = {id(p) for m in models for p in m.parameters()}
    for node in _below((r.grad_fn for r in roots), stop_at_outputs=False):
        if id(getattr(node, "variable", None)) in own:
            raise UsageError(
                "a loss goes through layers of the model without a call of it (modules of model.modules(), or those "
                "it was made of), and ranks do not add up such gradients: call model(...), model.layer(...) or "
                "model[i](...)"
            )


_last_called: list[Any] = []
"""The model that was called last."""


def current() -> LearningModel | None:
    """The model that was called last, if it still exists; otherwise None."""
    model: LearningModel | None = _last_called[0]() if _last_called else None
    return model


def record_call(model: LearningModel) -> None:
    """Let later backward passes use ``model``, the model that was called last."""
    if not _last_called or _last_called[0]() is not model:
        _last_called[:] = [ref(model)]
    follow_backwards()


def follow_backwards() -> None:
    """Look at every loss that is differentiated from now on."""
    replace_once(torch.autograd, "backward", _with_terms)


def _with_terms(original: Callable[..., None]) -> Callable[..., None]:
    def backward(tensors: Any, *args: Any, **options: Any) -> None:
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if isinstance(inputs := options.get("inputs"), Sequence):
            options["inputs"] = [p.held if isinstance(p, TensorPart) else p for p in inputs]
            if any(isinstance(p, DTensor) for p in options["inputs"]):
                raise UsageError(
                    "backward(inputs=...) does not know parameters that ranks hold in shards: set requires_grad of the "
                    "others to False, or plan with strategies=('ddp',)"
                )
        with torch._C.DisableTorchFunctionSubclass():
            called, nodes, graph, leaves, on, gathered, bare = search_graph(roots)
        if called is None or called.terms is None:
            if called is None and any(isinstance(r, Watched) for r in roots):
                _check_no_layers(roots)
            original(tensors, *args, **options)
            return
        if (options.get("create_graph") or args[2:3] == (True,)) and called.rank_context.ranks > 1:
            raise UsageError(
                "backward(create_graph=True) leaves p.grad with a graph, and ranks add up gradients without one: "
                "second derivatives by parameters are those of a plain copy (copy.deepcopy(model)) on whole batches"
            )
        if not called.learned:
            _other_batches(called)
            original(tensors, *args, **options)
            return
        with nullcontext() if called.in_step is None else called.in_step.together(BACKWARD):
            after = called.terms.before(nodes, called.mean_weight, called.mean_rows)
            beside = [*_weigh_beside(called, leaves), *_average_gathered(called, gathered)]
            _warn_of_parts(called, bare)
            try:
                if called.trial is None:
                    original(tensors, *args, **options)
                else:
                    handed = next(iter(args), options.get("grad_tensors"))
                    problem = "several losses are differentiated at once" if len(roots) > 1 else ""
                    if handed is not None or roots[0].dim():
                        problem = "gradients are handed to backward"
                    called.trial.note(graph)
                    if called.in_step is not None and called.mean_weight:
                        called.in_step.bent = hash((called.in_step.bent, on)) if on else called.in_step.bent
                    called.trial.around(roots[0], lambda: original(tensors, *args, **options), problem, on)
            except RuntimeError as error:
                if "mixed torch.Tensor and DTensor" in str(error):
                    raise UsageError(
                        "a parameter that ranks hold in shards goes into the loss beside the model's outputs: use "
                        "p.full_tensor() there, or plan with strategies=('ddp',)"
                    ) from error
                raise
            finally:
                after()
                for handle in beside:
                    handle.remove()
            if called.in_step is not None:
                called.in_step.graded(whole_parameters(called)[0])
            if called.watch is not None:
                called.watch.stepped(full=called.full)

    return backward
