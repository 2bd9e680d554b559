"""Programs that reckon with the model's parameters and plain tensors together: copies, averages and differences."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel

from benchmarks.program_table import program
from benchmarks.program_table.common import CE, MSE, Named, classified, one_step

KIND = "copies"


def add(name: str, update: Callable[[Any, Any], object], grad: bool = False) -> None:
    """Add a program that calls ``update(slow, net)`` behind each step; ``slow`` is a plain model."""

    def loop(net: Any, opt: Any, batches: Any) -> Any:
        slow = Named().double()
        slow.load_state_dict(net.state_dict())
        for _ in range(2):
            for x, y in batches:
                one_step(net, opt, x, y)
                with torch.set_grad_enabled(grad):
                    update(slow, net)
        return {f"slow.{k}": v for k, v in slow.state_dict().items()}

    program(KIND, name, lambda: classified(Named), loop)


def each(update: Callable[[Any, Any], object]) -> Callable[[Any, Any], None]:
    """``update`` of each plain parameter by one of the model's."""

    def all_of(slow: Any, net: Any) -> None:
        for p, w in zip(slow.parameters(), net.parameters(), strict=True):
            update(p, w)

    return all_of


def _assign(p: Any, value: Any) -> None:
    p.data = value


def _grad(p: Any, w: Any) -> None:
    p.grad = w.grad.clone()


def _index(p: Any, w: Any) -> None:
    p[:] = w


def _rows(p: Any, w: Any) -> None:
    for i in range(len(p)):
        p[i] = 0.5 * p[i] + 0.5 * w[i]


def _inplace(p: Any, w: Any) -> None:
    p.data -= 0.1 * (p.data - w.data)


def _by_foreach(slow: Any, net: Any) -> None:
    torch._foreach_mul_(list(slow.parameters()), 0.9)
    torch._foreach_add_(list(slow.parameters()), list(net.parameters()), alpha=0.1)


def _by_vector(slow: Any, net: Any) -> None:
    mixed = 0.9 * parameters_to_vector(slow.parameters()) + 0.1 * parameters_to_vector(net.parameters())
    vector_to_parameters(mixed, slow.parameters())


def _by_vector_back(_slow: Any, net: Any) -> None:
    vector_to_parameters(0.9 * parameters_to_vector(net.parameters()), net.parameters())


def _by_state(slow: Any, net: Any, assign: bool = False) -> None:
    ours, theirs = slow.state_dict(), net.state_dict()
    slow.load_state_dict({k: 0.9 * v + 0.1 * theirs[k] for k, v in ours.items()}, assign=assign)


def _by_names(slow: Any, net: Any, assign: bool = False) -> None:
    theirs = dict(net.named_parameters())
    slow.load_state_dict({k: 0.9 * v + 0.1 * theirs[k].detach() for k, v in slow.named_parameters()}, assign=assign)


def _back_by_state(slow: Any, net: Any) -> None:
    _by_state(slow, net)
    net.load_state_dict(slow.state_dict())


def _new_parameters(slow: Any, net: Any) -> None:
    theirs = dict(net.named_parameters())
    for name, module in slow.named_children():
        module.weight = nn.Parameter(0.5 * module.weight.detach() + 0.5 * theirs[f"{name}.weight"].detach())


def _through_file(slow: Any, net: Any) -> None:
    file = io.BytesIO()
    torch.save({k: v - slow.state_dict()[k] for k, v in net.state_dict().items()}, file)
    file.seek(0)
    change = torch.load(file)
    for name, p in slow.named_parameters():
        p.data = p.data + 0.3 * change[name]


def _soup(slow: Any, net: Any) -> None:
    states = [slow.state_dict(), net.state_dict()]
    slow.load_state_dict({k: sum(s[k] for s in states) / 2 for k in states[0]})


add("copies: data is a sum of both", each(lambda p, w: _assign(p, p.data * 0.9 + w.data * 0.1)))
add("copies: data is a copy", each(lambda p, w: _assign(p, w.data.clone())))
add("copies: data is the other's data", each(lambda p, w: _assign(p, w.data)))
add("copies: data is a detached parameter", each(lambda p, w: _assign(p, w.detach())))
add("copies: data between both", each(lambda p, w: _assign(p, p.data.lerp(w.data, 0.1))))
add("copies: data in another type and back", each(lambda p, w: _assign(p, (w.data * 0.9).float().double())))
add("copies: the model's data is a sum of both", each(lambda p, w: _assign(w, p.data * 0.9 + w.data * 0.1)))
add("copies: the model's data is a whole tensor", each(lambda p, w: _assign(w, p.data * 0.9)))
add("copies: set_", each(lambda p, w: p.set_(0.9 * w.detach())))
add("copies: the model's set_", each(lambda p, w: w.set_(0.9 * p.detach())))
add("copies: copy_ of a sum", each(lambda p, w: p.copy_(0.9 * p + 0.1 * w)))
add("copies: data.copy_", each(lambda p, w: p.data.copy_(w.data)))
add("copies: index", each(_index))
add("copies: row by row", each(_rows))
add("copies: subtracted in place", each(_inplace))
add("copies: add_ of a difference", each(lambda p, w: p.data.add_(w.data - p.data, alpha=0.1)))
add("copies: lerp with out", each(lambda p, w: torch.lerp(p, w, 0.1, out=p)))
add("copies: stacked and averaged", each(lambda p, w: p.copy_(torch.stack([p, w]).mean(0))))
add("copies: where", each(lambda p, w: p.copy_(torch.where(p.abs() > 0.1, p, w))))
add("copies: the larger of both", each(lambda p, w: p.copy_(torch.maximum(p, w))))
add("copies: both moved", each(lambda p, w: (w.add_(p, alpha=-0.1), p.add_(w, alpha=0.1))))
add("copies: foreach", _by_foreach)
add("copies: foreach copy", lambda s, n: torch._foreach_copy_(list(s.parameters()), list(n.parameters())))
add("copies: vectors", _by_vector)
add("copies: vectors, back into the model", _by_vector_back)
add("copies: states", _by_state)
add("copies: states, assigned", lambda s, n: _by_state(s, n, assign=True))
add("copies: named parameters", _by_names)
add("copies: named parameters, assigned", lambda s, n: _by_names(s, n, assign=True))
add("copies: states, and back into the model", _back_by_state)
add("copies: new parameters", _new_parameters)
add("copies: differences through a file", _through_file)
add("copies: a soup of states", _soup)
add("copies: swapped", each(lambda p, w: torch.utils.swap_tensors(p, nn.Parameter(0.9 * w.detach()))))
add("copies: as arrays", each(lambda p, w: _assign(p, torch.from_numpy(0.9 * w.detach().numpy()))))
add("copies: torch.tensor of a parameter", each(lambda p, w: _assign(p, torch.tensor(0.9 * w.detach()))))


def _gradients(net: Any, opt: Any, batches: Any, clone: bool = True) -> Any:
    """A plain model steps by the model's gradients."""
    slow = Named().double()
    slow.load_state_dict(net.state_dict())
    other = torch.optim.SGD(slow.parameters(), 0.02, momentum=0.9)
    for x, y in batches:
        one_step(net, opt, x, y)
        for p, w in zip(slow.parameters(), net.parameters(), strict=True):
            p.grad = w.grad.clone() if clone else w.grad
        other.step()
    return {f"slow.{k}": v for k, v in slow.state_dict().items()}


def _accumulated_gradients(net: Any, opt: Any, batches: Any) -> Any:
    """Sums of gradients are kept in plain tensors and given to the model."""
    sums = [torch.zeros(w.shape, dtype=w.dtype) for w in net.parameters()]
    for i, (x, y) in enumerate(batches):
        opt.zero_grad()
        CE(net(x), y).backward()
        for s, w in zip(sums, net.parameters(), strict=True):
            s += w.grad
        if i % 2:
            for s, w in zip(sums, net.parameters(), strict=True):
                w.grad = s / 2
                s.zero_()
            opt.step()


def _penalty(net: Any, opt: Any, batches: Any) -> Any:
    """The distance from plain weights is in the loss, and their gradient is used, too."""
    slow = Named().double()
    other = torch.optim.SGD(slow.parameters(), 0.02)
    for x, y in batches:
        opt.zero_grad()
        other.zero_grad()
        apart = sum(((w - p) ** 2).sum() for p, w in zip(slow.parameters(), net.parameters(), strict=True))
        (CE(net(x), y) + 0.05 * apart).backward()
        opt.step()
        other.step()
    return {f"slow.{k}": v for k, v in slow.state_dict().items()}


def _blended_call(net: Any, opt: Any, batches: Any) -> Any:
    """A plain model is called with the model's parameters in its place."""
    slow = Named().double()
    for x, y in batches:
        opt.zero_grad()
        target = functional_call(slow, {k: 0.5 * v.detach() for k, v in net.named_parameters()}, (x,))
        (CE(net(x), y) + MSE(net(x), target)).backward()
        opt.step()


def _deep(net: Any, opt: Any, batches: Any) -> Any:
    """A deep copy of the model behind the call, averaged by data."""
    slow = copy.deepcopy(net)
    for x, y in batches:
        one_step(net, opt, x, y)
        for p, w in zip(slow.parameters(), net.parameters(), strict=True):
            p.data = p.data * 0.9 + w.data * 0.1
    return {f"slow.{k}": v for k, v in slow.state_dict().items()}


def _kept_lists(net: Any, opt: Any, batches: Any) -> Any:
    """Clones in a list, averaged and swapped in for the last epoch."""
    mean = [w.detach().clone() for w in net.parameters()]
    for _ in range(2):
        for x, y in batches:
            one_step(net, opt, x, y)
            mean = [0.9 * m + 0.1 * w.detach() for m, w in zip(mean, net.parameters(), strict=True)]
        for m, w in zip(mean, net.parameters(), strict=True):
            w.data, _ = m.clone(), w.data


def _averaged(net: Any, opt: Any, batches: Any) -> Any:
    """torch's average of the model, with a rule of the program's own."""
    average = AveragedModel(Named().double(), avg_fn=lambda a, p, _n: 0.9 * a + 0.1 * p)
    for x, y in batches:
        one_step(net, opt, x, y)
        average.update_parameters(net)
    return {f"slow.{k}": v for k, v in average.module.state_dict().items()}


def _whole_norm(net: Any, opt: Any, batches: Any) -> Any:
    """Gradients are made orthogonal to a plain direction (PCGrad with an auxiliary direction)."""
    aim = [torch.linspace(-1, 1, w.numel(), dtype=w.dtype).view(w.shape) for w in net.parameters()]
    for x, y in batches:
        opt.zero_grad()
        CE(net(x), y).backward()
        with torch.no_grad():
            dot = sum((w.grad * a).sum() for w, a in zip(net.parameters(), aim, strict=True))
            size = sum(a.square().sum() for a in aim)
            for w, a in zip(net.parameters(), aim, strict=True):
                w.grad = w.grad - (dot.clamp(max=0) / size) * a
        opt.step()


for _name, _loop in {
    "gradients of the model": _gradients,
    "gradients of the model, the same tensors": lambda n, o, b: _gradients(n, o, b, clone=False),
    "sums of gradients in plain tensors": _accumulated_gradients,
    "a distance in the loss": _penalty,
    "functional_call of a plain model": _blended_call,
    "a deep copy behind the call, by data": _deep,
    "clones in a list, swapped in": _kept_lists,
    "AveragedModel with a rule": _averaged,
    "gradients against a direction": _whole_norm,
}.items():
    program(KIND, f"copies: {_name}", lambda: classified(Named), _loop)
