"""``asa.parallelize``: distributes a model, an optimizer and a loader over the ranks, for an unchanged training
loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from asa.api.arguments import check_training, read
from asa.api.calls import Call, guesses, plain, why_not
from asa.api.loop.closures import follow_closures
from asa.api.loop.distributed_loader import DistributedLoader
from asa.api.loop.process_counts import tell_of_process_counts
from asa.api.messages import say
from asa.api.model.coupling import (
    CHANGED,
    changes_inputs,
    coupled,
    fewest_rows,
    keeps_rows,
    normalises_parts,
    returns_numbers,
    warning_of,
)
from asa.api.model.distributed_model import DistributedModel, check_new, local_rows
from asa.api.model.notes import differences, trained_norms
from asa.api.model.optimizers import Rebinding, check_whole, no_shards_because, others_over, planned_like
from asa.api.model.optimizers import elementwise as known_elementwise
from asa.api.model.own_methods import check_overridden
from asa.api.model.whole_model import DATA, rebuild, spare_of, whole_plan
from asa.api.patching import replace_imported
from asa.api.plans.planned import Origins, agreed_plan, checked_plan, cost_model, usual_cache
from asa.api.plans.planning import device_of, one_tensor, shaped, spec_of
from asa.api.plans.requests import PlanOptions
from asa.api.rank_context import RankContext, join_ranks, same_weights
from asa.api.steps.batches import GlobalBatches
from asa.api.steps.in_step import InStep, in_step
from asa.api.steps.watch import StepWatch
from asa.api.tensors.names import StateNames
from asa.api.tensors.retired import retire
from asa.errors import InvalidInputError, UsageError
from asa.executor.model.materialize import materialize
from asa.executor.model.parallel import ParallelModel
from asa.ir.cluster import Cluster
from asa.ir.layout import Layout
from asa.ir.plan import Plan
from asa.ir.profile import Precision
from asa.launch import give_back_freed_memory, launched
from asa.planner import parse_pin
from asa.planner.space.baselines import check as check_strategies
from asa.sharding.layers.batchnorm import without_torch_groups
from asa.sharding.split.local_parts import local
from asa.strategies import offered
from asa.tracing import TracedModel, called
from asa.tracing.preserve import mark_written, parameters_restored, preserved, written

SEVERAL = 8
"""Number of samples with which a model is tested for dependence between samples."""
ONLY_WHOLE = "it runs on whole batches of the loader, and not on some samples of one"
NUMBERS = "there is a Python number in its output, which may be another for other samples"
KEEPS_ROWS = "it keeps something from call to call with a row for each sample, and each rank has its own"


def parallelize(
    model: nn.Module,
    optimizer: Optimizer,
    loader: Any,
    *,
    plan: Plan | Path | str = "auto",
    example_input: Any = None,
    cluster: Cluster | Path | str | None = None,
    strategies: Sequence[str] | str | None = None,
    pins: Sequence[str] | str = (),
    memory_bytes: int | None = None,
    precision: Precision = "fp32",
    batch_norm: Literal["local", "exact"] = "local",
    device: str = "auto",
    elementwise: bool | None = None,
    seed: int = 0,
    observe: bool = True,
    time_limit_s: float = 15.0,
    cache: Path | str | None = "auto",
    timeout_s: float = 300.0,
) -> tuple[DistributedModel, Optimizer, DistributedLoader]:
    """Distribute ``model``, ``optimizer`` and ``loader`` over the available ranks; every rank calls this.

    Ranks are those of ``torchrun`` (or another launcher), or of an existing process group; alone, nothing is
    distributed and nothing measured. Rank 0 profiles the model and plans once (stored for the next time under
    ``cache``); its weights are copied to all ranks. The loop stays::

        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()

    and has the same result as on one device. ``loader`` yields this rank's samples of every batch, and the mean loss
    over them is weighted by their number. So a loss must be a *mean over the batch*; its value is the mean over this
    rank's samples. Every sample goes to one rank. If a batch is too small (fewer samples than ranks, or than the model
    or the loss needs per rank), several ranks compute the same samples, which count once. BatchNorm normalizes over a
    rank's samples, as in data parallelism (``batch_norm="exact"``: over all); its running statistics are averaged at
    the end of each pass over the loader.

    A loop can have only one stage: plans are without pipelines and without accumulation. For those, use
    :class:`asa.Job`.

    Args:
        model: its inputs have the batch as first dimension. A model with a single input tensor may be cut into
            components; every other one runs as a whole, under a form of data parallelism.
        optimizer: any optimizer; it keeps its groups, hyperparameters and state. Parameters are not sharded if it is
            not known to update element by element (see ``elementwise``).
        loader: yields global batches, as for one device. The samples of a ``DataLoader`` over an indexed dataset are
            loaded on the rank that needs them, in the order rank 0 draws; any other iterable of batches is read by all.
        plan: a plan for this number of ranks, or its file.
        example_input: the arguments of the model: a tensor, a tuple of inputs, or a dictionary of them by name. By
            default it is guessed from the loader's batches.
        cluster, strategies, pins, memory_bytes, precision: as for :func:`asa.plan`.
        device: ``auto``, ``cpu`` or ``cuda``.
        elementwise: whether ``optimizer`` updates element by element, if it is not of ``torch.optim``: only then
            may ranks hold shards of parameters.
        observe: print to standard error which rank is slow, and what another plan would gain.
        time_limit_s: seconds for measuring the model, and the links between the ranks if they are unknown.
        cache: folder for plans; None stores nothing.
        timeout_s: seconds that a rank waits for the others; at most 60 the first time.

    Raises:
        UsageError: a plan for other ranks or with stages, a loader or an optimizer that cannot be used.
        InfeasibleError: no plan fits.
    """
    check_training(model, optimizer, loader)
    wishes = read(
        strategies=strategies, pins=pins, memory_bytes=memory_bytes, cluster=cluster, precision=precision,
        time_limit_s=time_limit_s,
    )  # fmt: skip
    read(plan=plan, batch_norm=batch_norm, seed=seed, cache=cache, timeout_s=timeout_s)
    check_new(model)
    if without_torch_groups(model):
        batch_norm = "exact"
    context = join_ranks(device, timeout_s)
    least = [2 if trained_norms(model) and batch_norm == "local" else 1]
    models: list[DistributedModel] = []
    counters: list[InStep] = []
    only_whole = False

    def rows(total: int) -> list[int]:
        if only_whole or (counters and counters[0].singly and total % context.ranks):
            return list(range(total))
        learning = not models or models[0].training
        return local_rows(total, context.ranks, context.rank, least[0] if learning else 1)

    batches, parameters = GlobalBatches(loader, context.votes, rows), dict(model.named_parameters())
    graded = [n for n, p in parameters.items() if p.grad is not None and bool(local(p.grad).any())]
    optimizers = [optimizer, *others_over(model, optimizer)]
    rebindings = [Rebinding(o, model, elementwise=known_elementwise(o, elementwise)) for o in optimizers]
    if context.ranks == 1 and plan == "auto":
        check_strategies(wishes["strategies"] or (), offered(), 2)  # names may be wrong where nothing is planned
        for pin in wishes["pins"]:
            parse_pin(pin)
        model.to(context.device)
        if not launched():
            warnings.warn(
                "1 process: nothing is spread; start several with torchrun --nproc-per-node N SCRIPT", stacklevel=2
            )
        undistributed = DistributedModel(None, context, origin=model)
        return undistributed, optimizer, DistributedLoader(batches, undistributed)
    shaped(model)
    check_overridden(model)
    for each in optimizers:
        check_whole(each)
    follow_closures()
    same_weights(context, model)
    call, why = find_call(context, model, batches, example_input)
    known_call = call
    writes = find_written(context, model, call)
    writes_by_samples = bool(writes) and written_by_samples(context, model, call, writes)
    whole_because = (*(no_shards_because(o, model, elementwise) for o in optimizers), kept_whole(writes))
    options = PlanOptions(
        global_batch=batches.batch_size, optimizer=planned_like(optimizer, context), pipelines=False,
        cache=cache_folder(cache), no_shards_because=next(filter(None, whole_because), ""), **wishes,
    )  # fmt: skip
    if writes and plan == "auto" and not why:  # components compute outputs, and change nothing
        why = f"its forward changes {writes[0]}"
    only_whole = why == ONLY_WHOLE
    subject: nn.Module | TracedModel = model
    example = torch.zeros(2, 1)
    chosen = checked_plan(context, plan) if plan != "auto" else None
    if chosen is not None and why == KEEPS_ROWS:  # the plan was made for components of the model
        say(context, f"the model keeps{KEEPS_ROWS.removeprefix('it keeps')}")
        why = ""
    if why:
        subject = called(model, name=spec_of(model), reason=why)
        if chosen is not None and {layout.data for layout in chosen.layouts()} != {context.ranks}:
            raise UsageError(
                f"the plan has ranks compute the same samples, and the model can only run whole, each rank on its own: "
                f"{why}; leave out plan=, or hand in one of ddp, zero1, zero2 or fsdp"
            )
    elif call is not None and call.tensor is not None:
        example = call.tensor if len(call.tensor) > 1 else call.tensor.repeat(2, *(1,) * (call.tensor.dim() - 1))
    origins: Origins | None = None
    if chosen is None and not isinstance(subject, TracedModel):
        try:
            chosen, origins = agreed_plan(context, model, example, options)
            say(context, chosen.summary())
        except InvalidInputError as error:  # a model that cannot be measured or cut can still be trained as a whole
            why, call = str(error), None
            subject = called(model, name=spec_of(model), reason=why)
    if chosen is None:
        assert isinstance(subject, TracedModel)
        chosen = whole_plan(context, model, subject, call, options, why)
        say(context, f"the model runs whole under {chosen.strategy}: {why}")
    if len(chosen.stages) > 1 or chosen.num_microbatches > 1:
        raise UsageError(
            f"the plan has {len(chosen.stages)} stages and {chosen.num_microbatches} microbatches: a loop of one's own "
            "runs one of each; use asa.Job, or plan without pipelines"
        )
    names, normalised = StateNames(model), trained_norms(model)

    def build(new_plan: Plan, subject_of_plan: nn.Module | TracedModel) -> ParallelModel:
        built = materialize(
            new_plan, subject_of_plan, example.to(device_of(model)), rank=context.rank, strategies=offered(),
            device=context.device, seed=seed, batch_norm=batch_norm, timeout_s=timeout_s, keyed_draws=True,
            outer=Layout(width=context.ranks, data=context.ranks, tensor=1),
        )  # fmt: skip
        built.meet = meet
        return built

    def meet(what: str, *, within_s: float) -> None:
        with counters[0].together(what):
            context.votes.meet(what, within_s=within_s)

    spare = spare_of(model) if not why else None
    several = None if only_whole else with_more_samples(model, batches, known_call)
    change = coupled(model, several, exact=batch_norm == "exact") if context.rank == 0 else 0.0
    degrees = {layout.data for layout in chosen.layouts()}
    if degrees == {1}:  # every rank computes on all samples
        least[:] = [1]
    all_independent = degrees == {context.ranks}
    samples_meet = bool(context.votes.tell(change > 0))
    fewest = int(
        context.votes.tell(fewest_rows(model, several, exact=batch_norm == "exact") if context.rank == 0 else 1)
    )
    if degrees != {1}:  # BatchNorm needs more than one sample
        least[:] = [max(*least, fewest, 2 if samples_meet and all_independent else 1)]
    if only_whole:
        least[:] = [batches.batch_size]
    found: list[str] = []
    if context.rank == 0:  # the others do not take part
        if batch_norm == "exact" and degrees != {1} and (parted := normalises_parts(model, several)):
            found.append(
                f"BatchNorm ({parted}) normalises over parts of a batch: a rank takes them of its own samples, and one "
                "device of all; plan with strategies=('tensor',), or have a part be all samples of a call"
            )
        if not (batches.indexed and all_independent) and changes_inputs(model, known_call):
            found.append(CHANGED)
    parallel = build(chosen, subject)
    lines = differences(chosen, parallel, normalised, writes, batch_norm, by_samples=writes_by_samples)
    for line in (*lines, *warning_of(change, chosen), *found) if context.rank == 0 else ():
        warnings.warn(line, stacklevel=2)
    if context.ranks > 1 and batches.draws_locally:
        say(context, "the loader's data set or collate_fn draws random numbers, or gives other numbers each time a "
            "sample is read: each rank draws its own, and one process others")  # fmt: skip

    def run_whole_instead(model: DistributedModel, reason: str) -> ParallelModel:
        """Rebuild the model to run as a whole under data parallelism, with current weights and optimizer state."""
        assert spare is not None
        return rebuild(model, reason, spare.copy(), build, options, rebindings)

    distributed = DistributedModel(
        parallel, context, origin=model, names=names, rebuild_whole=None if spare is None else run_whole_instead
    )
    models.append(distributed)
    distributed.begin(model.training)
    if observe and StepWatch.applies(context, chosen):
        distributed.__dict__["watch"] = StepWatch(
            context, chosen, None if origins is None else cost_model(origins, options)
        )
    counters.append(counter := in_step(timeout_s))
    counter.count(optimizers)
    distributed.__dict__.update(in_step=counter, optimizers=optimizers, coupled=samples_meet, least=least)
    outside = [name for rebinding in rebindings for name in rebinding.outside(parallel)]
    for rebinding in rebindings:
        rebinding.apply(parallel, distributed.views)
    data_allowed = all_independent if plan != "auto" else not strategies or bool(set(strategies) & set(DATA))
    if outside and spare is not None and data_allowed:
        distributed.run_whole(f"its forward does not read {outside[0]}, which the optimizer updates")
    elif outside:
        warnings.warn(
            f"{outside[0]} is not updated: the model's forward does not read it, and the plan cuts the model into "
            "components; leave out plan= and strategies= to have the model run whole",
            stacklevel=2,
        )
    distributed.say_of_draws()
    tell_of_process_counts(context)
    say_of_hooks(context, model, chosen)
    if taken := taken_names(model, distributed):
        warnings.warn(
            f"model.{taken[0]} is not the model's own behind asa.parallelize, which has something else under this "
            "name: rename it" + (f", and {', '.join(taken[1:])}" if taken[1:] else ""),
            stacklevel=2,
        )
    distributed.remember()
    now = dict(distributed.named_parameters(remove_duplicate=False))
    if lost := [n for n in graded if n in now and now[n].grad is None]:
        warnings.warn(
            f"{lost[0]} had a gradient before the call, and ranks that hold parts begin without: call "
            "optimizer.zero_grad() before, if it is not to count",
            stacklevel=2,
        )
    retire(parameters, now)
    shared = DistributedLoader(batches, distributed)
    replace_imported()
    give_back_freed_memory()  # the model was traced and cut up
    return distributed, optimizer, shared


def find_written(context: RankContext, model: nn.Module, call: Call | None) -> list[str]:
    """Names of the parameters that the model's forward writes (collective); without those of embeddings with
    ``max_norm``, of which :func:`differences` tells."""

    def find() -> list[str]:
        if call is not None and not written(model):
            why_not(model, call)
        return written(model)

    names = [str(name) for name in context.votes.tell(context.votes.once(find))]
    mark_written(model, names)
    shortened = {id(m.weight) for m in model.modules() if getattr(m, "max_norm", None) is not None}
    return [name for name, p in model.named_parameters() if name in names and id(p) not in shortened]


def written_by_samples(context: RankContext, model: nn.Module, call: Call | None, names: list[str]) -> bool:
    """Whether what the model's forward writes into the parameters ``names`` depends on its inputs, as far as other
    numbers in them tell (collective)."""

    def values(of: Callable[[Tensor], Tensor]) -> list[Tensor]:
        assert call is not None
        device = device_of(model)
        args, options = pytree.tree_map(
            lambda t: of(t).to(device) if isinstance(t, Tensor) else t, (call.args, call.options)
        )
        with preserved(model), parameters_restored(model), torch.no_grad():
            model(*args, **options)
            now = dict(model.named_parameters())
            return [now[n].detach().clone() for n in names]

    def differ() -> bool:
        tensors = [] if call is None else pytree.tree_leaves((call.args, call.options))
        if not any(isinstance(t, Tensor) and t.is_floating_point() for t in tensors):
            return True
        try:
            one, other = values(torch.clone), values(lambda t: t * 0.5 + 1 if t.is_floating_point() else t)
        except Exception:  # whatever a model's code may raise
            return True
        return not all(map(torch.equal, one, other))

    return bool(context.votes.tell(context.votes.once(differ)))


def say_of_hooks(context: RankContext, model: nn.Module, plan: Plan) -> None:
    """Print whether a hook of the program's own sees what a rank computes of a layer."""
    of_torch = ("torch.", "asa.")
    name = next(
        (
            n
            for n, m in model.named_modules()
            for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())
            if not (getattr(hook, "__module__", None) or type(hook).__module__).startswith(of_torch)
        ),
        None,
    )
    if name is not None and max(layout.data for layout in plan.layouts()) > 1:
        say(context, f"a forward hook on {name or 'the model'} sees this rank's samples: what a loop makes of them "
            "(statistics, curvature) is of those; asa.reduce(x) and asa.gather(x) are of all")  # fmt: skip


def taken_names(model: nn.Module, distributed: DistributedModel) -> list[str]:
    """Names of attributes of ``model`` that ``distributed`` has for something of its own."""
    usual = {*dir(nn.Module), *nn.Module().__dict__}
    kinds = [vars(kind) for kind in type(model).__mro__ if kind not in nn.Module.__mro__]
    names = {*model._parameters, *model._buffers, *model._modules, *vars(model)}.union(*kinds) - usual
    return sorted(n for n in names if n[0] != "_" and (n in vars(distributed) or hasattr(type(distributed), n)))


def kept_whole(writes: list[str]) -> str:
    """Why parameters are kept whole where a model's forward writes some; empty if it writes none."""
    return f"forward changes {writes[0]}" if writes else ""


def cache_folder(cache: Path | str | None) -> Path | None:
    """The folder for ``cache``; None if nothing is stored."""
    return usual_cache() if cache == "auto" else None if cache is None else Path(cache)


def with_more_samples(model: nn.Module, batches: GlobalBatches, call: Call | None) -> Call | None:
    """``call`` with more samples of the loader; None if the loader cannot provide them."""
    if call is None:
        return None
    try:
        batch = batches.example(min(SEVERAL, batches.batch_size))
    except Exception:  # whatever a data set or a collate_fn raises
        return call
    candidates = (
        w for w in guesses(model, batch) if len(w.args) == len(call.args) and w.options.keys() == call.options.keys()
    )
    wider_call = next(candidates, call)
    same = all(
        isinstance(a, Tensor) == isinstance(b, Tensor) and (not isinstance(a, Tensor) or a.shape[1:] == b.shape[1:])
        for a, b in zip(
            (*wider_call.args, *wider_call.options.values()), (*call.args, *call.options.values()), strict=True
        )
    )
    return wider_call if same and not why_not(model, wider_call) else call


def find_call(
    context: RankContext, model: nn.Module, batches: GlobalBatches, example_input: Any
) -> tuple[Call | None, str]:
    """The arguments of the model, if known, and the reason why it cannot be cut into components (collective). The
    reason is empty if the model takes one tensor.

    ``example_input``: a tensor, a tuple of inputs or a dictionary of them by name. If it is None, the first way to call
    the model with the loader's batch that runs is used.
    """
    if example_input is not None:
        if isinstance(example_input, Mapping):
            call = plain(model, (), dict(example_input))
        elif isinstance(example_input, tuple | list):
            call = plain(model, tuple(example_input), {})
        else:
            call = Call((one_tensor(example_input),))
        return call, "" if call.tensor is not None else f"it is called with {call}"
    candidates = list(guesses(model, batches.example()))

    def choose() -> tuple[int, str]:
        reasons = []
        for i, way in enumerate(candidates):
            reason = why_not(model, way)
            if not reason:
                return i, KEEPS_ROWS if keeps_rows(model, way) else NUMBERS if returns_numbers(model, way) else ""
            reasons.append(reason)
        return -1, reasons[0]

    choice = context.votes.tell(context.votes.once(choose))
    index, reason = int(choice[0]), str(choice[1])
    if index < 0:  # one graph, a loss over the batch: few samples are no batch
        whole = list(guesses(model, batches.example(batches.batch_size)))
        found = context.votes.once(lambda: next((i for i, way in enumerate(whole) if not why_not(model, way)), -1))
        if (at := int(context.votes.tell(found))) >= 0:
            return whole[at], ONLY_WHOLE
    if index < 0:
        cause = "it does not run on the loader's batches"
        return None, f"{cause} ({reason[:160]}), so how it is called is not known; say so with example_input"
    call = candidates[index]
    tensor = call.tensor
    if tensor is None or reason:
        return call, reason or f"it is called with {call}"
    return Call((tensor if len(tensor) > 1 else tensor.repeat(2, *(1,) * (tensor.dim() - 1)),)), ""
