"""Optimizers over the parameters that a rank holds, and the learning rate over a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch._dynamo  # every optimizer imports it when it is made: here, once, and not in each forked rank
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asa.errors import InvalidInputError, UsageError
from asa.executor.model.offload import HostCopies, attach
from asa.executor.model.parallel import ParallelModel
from asa.executor.model.state import local_tensors
from asa.executor.training.settings import LEARNING_RATE, WEIGHT_DECAY
from asa.ir.optimizers import OPTIMIZERS, check_optimizer
from asa.sharding.split.local_parts import step_over_parts
from asa.zoo.foreign import accepted, at_home, factory, first_line


def build_optimizer(
    name: str,
    parameters: Sequence[nn.Parameter],
    *,
    lr: float | None = None,
    momentum: float = 0.9,
    weight_decay: float | None = None,
    offloaded: Collection[nn.Parameter] = (),
) -> torch.optim.Optimizer:
    """Make an optimizer over ``parameters``. ``name`` is ``sgd`` (with momentum), ``adamw``, the lower-case name of
    another class of ``torch.optim``, or ``package.module:factory``, which is called. None selects the optimizer's usual
    value.

    The optimizer has one group for all parameters on the device, and one for those that are ``offloaded``, whose update
    is on the host. A rank may have no parameters; its optimizer then steps over an empty tensor.

    Raises:
        UsageError: there is no such optimizer, or its factory does not take a value that was given.
        InvalidInputError: the factory fails, or returns no torch optimizer.
    """
    trained = [p for p in parameters if p.requires_grad]
    on_host = [p for p in trained if p in offloaded]
    on_device = [p for p in trained if p not in offloaded] or [nn.Parameter(torch.empty(0))]
    # One fused kernel updates everything and allocates nothing; torch has none for complex numbers.
    fused = {"fused": all(p.is_floating_point() for p in trained)} if name in LEARNING_RATE else {}
    groups: list[dict[str, Any]] = [{"params": on_device, **fused}]
    copies = HostCopies(on_host)
    if on_host:
        groups.append({"params": list(copies.of.values()), **fused})
    optimizer = _make(name, groups, lr=lr, momentum=momentum, weight_decay=weight_decay)
    if on_host:
        attach(optimizer, copies)
    if any(isinstance(p, DTensor) for p in on_device):
        step_over_parts(optimizer)
    return optimizer


def _make(
    name: str, groups: list[dict[str, Any]], *, momentum: float, **settings: float | None
) -> torch.optim.Optimizer:
    options = {key: value for key, value in settings.items() if value is not None}
    if name == "sgd":
        usual = {"lr": LEARNING_RATE["sgd"], "weight_decay": WEIGHT_DECAY["sgd"], "momentum": momentum}
        return torch.optim.SGD(groups, **usual | options)  # type: ignore[arg-type]
    if name == "adamw":
        usual = {"lr": LEARNING_RATE["adamw"], "weight_decay": WEIGHT_DECAY["adamw"]}
        return torch.optim.AdamW(groups, **usual | options)  # type: ignore[arg-type]
    if ":" not in name:
        return getattr(torch.optim, OPTIMIZERS[check_optimizer(name)])(groups, **options)  # type: ignore[no-any-return]
    with at_home():
        make = factory(name, "optimizer")
        taken = accepted(make, options)
        for key, value in options.items():
            if key not in taken:
                raise UsageError(
                    f"{key} {value:g} would have no effect: the factory of optimizer {name!r} has no parameter {key}; "
                    f"add one, or leave {key} out"
                )
        try:
            result = make([p for group in groups for p in group["params"]], **taken)
        except (Exception, SystemExit) as error:
            raise InvalidInputError(f"optimizer {name!r} failed with {first_line(error)}") from None
    if not isinstance(result, torch.optim.Optimizer):
        raise InvalidInputError(f"optimizer {name!r}: the factory returned a {type(result).__name__}, no optimizer")
    if any("lr" not in group for group in result.param_groups):
        raise InvalidInputError(
            f"optimizer {name!r}: a group of parameters has no 'lr', which the run's schedule sets; give each one"
        )
    return result


def updates_parts(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is known to update a shard of a parameter as it would update that part of the whole."""
    kind = type(optimizer)
    return kind.__name__ in OPTIMIZERS.values() and kind.__module__.startswith("torch.optim")


def cut_parameters(model: ParallelModel) -> Iterator[str]:
    """Names of parameters of which this rank updates only a shard."""
    for item in local_tensors(model):
        cut = isinstance(item.tensor, DTensor) or (item.shard is not None and item.axis.size > 1)
        if cut and isinstance(item.tensor, nn.Parameter):
            yield item.name


SEVERAL = "several parameters"


def couples(name: str, **settings: float | None) -> str:
    """What the optimizer ``name`` uses together in an update, found by a trial on small parameters: ``all elements of a
    parameter``, or ``several parameters`` (as a norm of all gradients does); empty for single elements, and where the
    trial fails. ``settings`` as for :func:`build_optimizer`."""
    numbers = torch.Generator().manual_seed(0)
    values, *gradients = ([torch.randn(rows, 4, generator=numbers) for rows in (4, 3)] for _ in range(4))

    def updated(rows: int, count: int) -> Tensor:
        """The first two rows of the first of ``count`` parameters, of which the optimizer has so many ``rows``."""
        held = [nn.Parameter(values[i][: rows if i == 0 else None].clone()) for i in range(count)]
        torch.manual_seed(0)
        optimizer = build_optimizer(name, held, **settings)  # type: ignore[arg-type]
        for of_step in gradients:
            for p, gradient in zip(held, of_step, strict=False):
                p.grad = gradient[: len(p)].clone()
            optimizer.step()
        return held[0].detach()[:2]

    with torch.random.fork_rng(devices=[]):
        try:
            whole = updated(4, 2)
            if not torch.allclose(updated(4, 1), whole, rtol=1e-4, atol=1e-6):
                return SEVERAL
            return "" if torch.allclose(updated(2, 2), whole, rtol=1e-4, atol=1e-6) else "all elements of a parameter"
        except Exception:
            return ""


def state_words(optimizer: torch.optim.Optimizer) -> float | None:
    """Bytes of state that the optimizer keeps for each byte of a parameter, found by a step of another one of its class
    with its settings on a small parameter of the same type; None where such a step fails."""
    kind, like = type(optimizer), next((p for group in optimizer.param_groups for p in group["params"]), None)
    if like is None:
        return None
    p = nn.Parameter(torch.zeros(8, 8, dtype=like.dtype))
    try:
        trial = kind([p], **accepted(kind, optimizer.defaults))  # type: ignore[call-arg]
        p.grad = torch.ones_like(p)
        trial.step()
        kept = [v for v in trial.state[p].values() if isinstance(v, Tensor) and v.numel() > 1]
    except Exception:
        return None
    return sum(v.nbytes for v in kept) / p.nbytes


def doubt_about_parts(optimizer: torch.optim.Optimizer, name: str, remedy: str) -> str:
    """Warning for an ``optimizer`` that updates a shard of parameter ``name``. ``remedy`` says how to keep the
    parameter whole.

    Raises:
        UsageError: an optimizer of torch.optim that is known to use all elements of a parameter together.
    """
    kind = type(optimizer)
    why = f"the plan cuts parameters ({name}), of which a rank updates a part"
    if kind.__module__.startswith("torch.optim"):
        raise UsageError(f"{kind.__name__} uses all elements of a parameter together, and {why}; {remedy}")
    return f"{why}: correct only if {kind.__name__} updates element by element; otherwise {remedy}"


def doubt_about(
    optimizer: torch.optim.Optimizer, name: str, model: ParallelModel, **settings: float | None
) -> str:  # fmt: skip
    """Warning for the ``optimizer`` called ``name`` if ranks or servers hold parts of parameters; empty if they do not,
    or if it is known to update them alike. ``settings`` are those that it was made with.

    Raises:
        UsageError: it uses elements or parameters together of which the ranks of the plan, or its servers, hold only
            some.
    """
    if updates_parts(optimizer):
        return ""
    discipline = model.whole_plan.consistency
    if discipline is not None and discipline.served:
        together = couples(name, **settings)
        why = f"servers under {discipline} update slices of all weights, without the shapes of parameters"
        if together:
            raise UsageError(f"optimizer {name!r} uses {together} together, and {why}; train under ddp or local_sgd")
        return f"{why}: correct only if optimizer {name!r} updates element by element; otherwise train under ddp"
    remedy = "a plan made with --strategies ddp keeps them whole"
    cut, together = next(cut_parameters(model), None), couples(name, **settings)
    if together and (cut is not None or (len(model.plan.stages) > 1 and together == SEVERAL)):
        raise UsageError(f"optimizer {name!r} uses {together} together, of which a rank has only some; {remedy}")
    return "" if cut is None else doubt_about_parts(optimizer, cut, remedy)


def try_out(name: str, lr: float | None = None) -> None:
    """Check that the optimizer ``name`` can be made, with the learning rate ``lr`` if there is one, and takes a step.

    Raises:
        UsageError: the name has a wrong form, or the factory takes no learning rate.
        InvalidInputError: the optimizer fails.
    """
    p = nn.Parameter(torch.zeros(2, 2))
    optimizer = build_optimizer(name, [p], lr=lr)
    p.grad = torch.ones_like(p)
    try:
        optimizer.step()
    except Exception as error:
        raise InvalidInputError(f"optimizer {name!r}: a step failed with {first_line(error)}") from None


def cosine(progress: float) -> float:
    """Half a cosine, from 1 at ``progress`` = 0 to 0 at ``progress`` = 1 (Loshchilov & Hutter 2017)."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def learning_rate(
    progress: float, peak: float, *, warmup: float, step: float, schedule: Callable[[float], float] = cosine
) -> float:
    """Learning rate of the step that begins after the fraction ``progress`` of the run, 0 to 1.

    It rises linearly to ``peak`` over the fraction ``warmup``, and then follows ``schedule`` over the rest of the run.
    ``step`` is the progress of one step. The rate is that at the end of the step, so that no step has a rate of 0.

    >>> [learning_rate(p / 10, 1.0, warmup=0.2, step=0.1) for p in (0, 1, 2, 6)]
    [0.5, 1.0, 1.0, 0.5]
    """
    if progress < warmup:
        return peak * min(1.0, (progress + step) / warmup)
    return peak * schedule((progress - warmup) / (1 - warmup))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set ``rate`` as the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
