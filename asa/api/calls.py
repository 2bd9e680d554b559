"""Arguments of a model: one tensor, or any inputs by position and by name; guessed from a batch if not given."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from asa.errors import UsageError
from asa.tracing import UNCUT
from asa.tracing.preserve import parameters_restored, preserved
from asa.tracing.tracer import reason_of


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a model."""

    args: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def tensor(self) -> Tensor | None:
        """The only argument, if it is a tensor with a batch dimension; otherwise None."""
        if len(self.args) != 1 or self.options or not isinstance(self.args[0], Tensor) or not self.args[0].dim():
            return None
        return self.args[0]

    def __str__(self) -> str:
        items = [
            *map(_shortened, self.args),
            *(f"{name}={_shortened(value)}" for name, value in self.options.items()),
        ]
        return f"({', '.join(items)})"


def _shortened(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"tensor {list(value.shape)}"
    named = value is None or isinstance(value, bool | int | float | str)
    return repr(value)[:24] if named else type(value).__name__


def _parameters(model: nn.Module) -> list[inspect.Parameter]:
    """Parameters of the model's ``forward``; empty if unknown."""
    try:
        return list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return []


def plain(model: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Call:
    """The call in its shortest form: without arguments that are None by default, and with a single argument for the
    first parameter passed by position."""
    parameters = {p.name: p for p in _parameters(model)}
    short = {
        n: v for n, v in options.items() if v is not None or n not in parameters or parameters[n].default is not None
    }
    optional = [p.default is None for p in parameters.values()]
    while len(args) > 1 and args[-1] is None and len(args) <= len(optional) and optional[len(args) - 1]:
        args = args[:-1]
    first = next(iter(parameters.values()), None)
    if not args and len(short) == 1 and first is not None and first.name in short and first.kind != first.KEYWORD_ONLY:
        return Call((short[first.name],))
    return Call(args, short)


def guesses(model: nn.Module, batch: Any) -> Iterator[Call]:
    """Ways in which ``model`` may be called with a batch of a loader, most likely first: with a dictionary by the names
    of ``forward``'s parameters, otherwise with as many of the batch's items as it requires, then with more. A record is
    passed itself, or what it has by these names, or the first that it has."""
    parameters = _parameters(model)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if isinstance(batch, Mapping):
        names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        named = {name: value for name, value in batch.items() if name in names}
        if named:
            yield plain(model, (), named)
            if any(p.kind == p.VAR_KEYWORD for p in parameters):
                yield Call((), dict(batch))
        yield Call((batch,))
        return
    if not isinstance(batch, tuple | list) or isinstance(batch, PackedSequence) or not batch:
        yield Call((batch,))
        record = {} if isinstance(batch, Tensor | tuple | list) else dict(getattr(batch, "__dict__", {}))
        named = {p.name: record[p.name] for p in parameters if p.name in record}
        if named:
            yield plain(model, (), named)
        elif record:
            yield Call((next(iter(record.values())),))
        return
    least = max(1, sum(p.default is p.empty for p in positional))
    for count in range(min(least, len(batch)), max(1, min(len(positional) or 1, len(batch))) + 1):
        yield Call(tuple(batch[:count]))
    yield Call((batch,))


def requires_several(model: nn.Module) -> bool:
    """Whether ``model`` cannot be called with one input."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.default is p.empty for p in _parameters(model) if p.kind in positional) > 1


def why_not(model: nn.Module, call: Call) -> str:
    """Why ``model`` fails with this call; empty if it runs. The model is left unchanged; parameters that its forward
    writes are known to :func:`asa.tracing.preserve.written` then."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def tried(restored: AbstractContextManager[None]) -> str:
        with preserved(model), restored, torch.no_grad():
            try:
                moved = pytree.tree_map(
                    lambda t: t.to(device) if isinstance(t, Tensor) else t, (call.args, call.options)
                )
                model(*moved[0], **moved[1])
            except Exception as error:  # whatever a model's code may raise
                return reason_of(error)
        return ""

    # Some operators do not run while others are watched.
    return tried(parameters_restored(model)) and tried(nullcontext())


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for ``inputs``: a tuple is passed by position, a dictionary by name."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if type(inputs) is tuple else (inputs,)), {}


def lengths(values: Any) -> list[int]:
    """Candidates for the number of samples in a call or a batch, in order: first dimensions of tensors, lengths of
    lists, the largest batch size of a packed sequence."""
    result: list[int] = []

    def look(value: Any) -> None:
        if isinstance(value, PackedSequence):
            result.append(int(value.batch_sizes[0]))
        elif isinstance(value, Tensor):
            result.extend(value.shape[:1])
        elif isinstance(value, Mapping):
            for one in value.values():
                look(one)
        elif isinstance(value, tuple | list):
            if isinstance(value, list) and value:
                result.append(len(value))
            for one in value:
                look(one)

    look(values)
    return result


def samples_of(call: Call) -> int:
    """Number of samples in a call, judged by its shapes.

    Raises:
        UsageError: there is no tensor and no list in it.
    """
    counts = lengths((call.args, call.options))
    if not counts:
        raise UsageError(f"a call {call} holds nothing with one item per sample")
    return counts[0]


class Numbered(nn.Module):
    """Wraps a model with any inputs, for measurement, as a model with a single input tensor: the indices [N, 1] of
    samples of an example."""

    def __init__(self, model: nn.Module, example: Call) -> None:
        super().__init__()
        self.model, self._example, self._samples = model, example, samples_of(example)
        setattr(self, UNCUT, f"it is called with {example}")

    def forward(self, numbers: Tensor) -> Any:
        """The model's output for the samples ``numbers`` [N, 1] of the example; indices wrap around."""
        rows = (numbers[:, 0] % self._samples).tolist()
        device = numbers.device

        def selected(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return (leaf[rows] if leaf.shape[:1] == (self._samples,) else leaf).to(device)

        def entries(value: Any) -> Any:
            if isinstance(value, list) and len(value) == self._samples:
                return [pytree.tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, value[r]) for r in rows]
            if isinstance(value, dict):
                return {name: entries(one) for name, one in value.items()}
            if isinstance(value, tuple) and type(value) is tuple:
                return tuple(entries(one) for one in value)
            return pytree.tree_map(selected, value)

        return self.model(*(entries(a) for a in self._example.args), **entries(self._example.options))
