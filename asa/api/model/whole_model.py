"""The plan of a model that is not cut into components: a form of data parallelism for the whole model.

A model with several inputs, with inputs by name or with lists has no single tensor that could be passed from component
to component. Every form of data parallelism runs it unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from asa.api.calls import Call, Numbered, samples_of
from asa.api.messages import say
from asa.api.model.attributes import part_of
from asa.api.model.optimizer_states import FullStates
from asa.api.model.optimizers import Rebinding
from asa.api.plans.planned import Origins, StoredPlan, named_or_measured, plan_of_one
from asa.api.plans.planning import measured, spec_of
from asa.api.plans.requests import PlanOptions, request_of
from asa.api.rank_context import RankContext
from asa.api.tensors.names import StateNames
from asa.api.tensors.views import TensorViews
from asa.errors import AsaError, UsageError
from asa.executor.model.parallel import ParallelModel
from asa.interfaces.strategy import OPTIMIZER_WORDS
from asa.ir import codec
from asa.ir.cluster import Cluster
from asa.ir.plan import UNSPLIT, Assignment, DataDegree, DataStrategyName, Plan, Stage
from asa.planner import plan as solve
from asa.planner import usual_limit
from asa.tracing import TracedModel, called
from asa.tracing.preserve import with_parameters

if TYPE_CHECKING:
    from asa.api.model.distributed_model import DistributedModel

DATA: dict[str, DataStrategyName] = {"ddp": "replicate", "zero1": "zero1", "zero2": "zero2", "fsdp": "zero3"}
"""Data strategies for a whole model, by the names that users give."""
_FULL = 0.7
"""Fraction of a device's memory for weights, gradients and optimizer state above which they are sharded by default."""
_SAMPLES = 2


def allowed_strategies(options: PlanOptions, why: str) -> tuple[str, ...] | None:
    """Requested strategies that run a whole model; None if all are allowed.

    Raises:
        UsageError: there are none among the requested ones.
    """
    allowed = ("ddp",) if options.no_shards_because else tuple(DATA)
    if options.strategies is None:
        return allowed if options.no_shards_because else None
    possible = tuple(s for s in options.strategies if s in allowed)
    if not possible:
        raise UsageError(
            f"strategies {', '.join(options.strategies)} cannot be had: the model runs whole, because {why}"
            f"{'; ' * bool(options.no_shards_because)}{options.no_shards_because}; choose among {', '.join(allowed)}"
        )
    return possible


def whole_plan(
    context: RankContext, model: nn.Module, traced: TracedModel, call: Call | None, options: PlanOptions, why: str
) -> Plan:  # fmt: skip
    """The plan for all ranks of a model that is called as a whole, traced as ``traced`` (collective).

    ``call`` is how it is called, with at least two samples; if that is unknown, nothing is measured.

    Raises:
        AsaError: raised on rank 0, and then on every rank.
    """
    votes = context.votes
    stored = votes.once(lambda: _stored_plan(context, traced, call, options))
    stored_result = stored.read() if stored is not None else None
    plan: Plan | None = stored_result[0] if stored_result is not None else None
    if not votes.tell(plan is not None):
        measurable = votes.tell(call is not None) and context.ranks > 1
        measuring = named_or_measured(context, options) if measurable else (lambda _profile: None)
        answer = votes.once(lambda: _choose_plan(context, model, traced, call, options, why, measuring))
        if answer is not None:
            plan, origins = answer
            if origins is not None and stored is not None:
                stored.write(plan, origins)
    text = votes.tell(None if plan is None else codec.dumps(plan))
    return codec.loads(Plan, text, source="the plan from rank 0")


def _choose_plan(
    context: RankContext, model: nn.Module, traced: TracedModel, call: Call | None, options: PlanOptions, why: str,
    cluster: Callable[[Any], Cluster | None],
) -> tuple[Plan, Origins | None]:  # fmt: skip
    names = allowed_strategies(options, why)
    unmeasured = "nothing was measured"
    if call is not None and context.ranks > 1 and names != ("ddp",):
        try:
            return _measure_and_plan(context, model, traced, call, options, names, cluster)
        except UsageError:
            raise
        except Exception as error:  # a model that cannot be measured may still be trained
            unmeasured = f"it could not be measured ({' '.join(str(error).split())[:120]})"
    return by_hand(context, model, traced, options, names, f"{why}; {unmeasured}"), None


def _measure_and_plan(
    context: RankContext, model: nn.Module, traced: TracedModel, call: Call, options: PlanOptions,
    names: tuple[str, ...] | None, cluster: Callable[[Any], Cluster | None],
) -> tuple[Plan, Origins]:  # fmt: skip
    numbers = torch.arange(max(_SAMPLES, samples_of(call))).view(-1, 1)
    profile = measured(
        Numbered(model, call), numbers, num_classes=1, global_batch=options.global_batch, precision=options.precision,
        limit_s=options.time_limit_s, max_degree=1, device=context.device,
    )  # fmt: skip
    links = cluster(profile)
    assert links is not None
    asked = replace(options, strategies=names or tuple(DATA), pipelines=False, no_shards_because="")
    for plan in solve(profile, links, *request_of(context.ranks, asked, usual_limit(context.ranks))):
        (only,) = plan.components
        if only.data.degree == context.ranks and not only.checkpoint:
            plan_of_model = replace(
                plan,
                model_spec=spec_of(model),
                model_fingerprint=traced.model_fingerprint,
                components=(replace(only, name="model"),),
                num_microbatches=1,
                notes=(*plan.notes, *traced.notes),
            )
            return plan_of_model, Origins(profile=profile, cluster=links)
    raise AsaError("no plan has the whole model on every rank")


def by_hand(
    context: RankContext, model: nn.Module, traced: TracedModel, options: PlanOptions,
    names: tuple[str, ...] | None, why: str,
) -> Plan:  # fmt: skip
    """A plan without measurements: the requested strategy; otherwise replicas, or shards if weights and optimizer state
    would fill a device."""
    from asa.profiler.machine import device_record

    room = options.memory_bytes or device_record(context.device).memory_bytes
    state = sum(p.nbytes for p in model.parameters()) * (2 + OPTIMIZER_WORDS[options.optimizer])
    full = state > _FULL * room
    name = next(iter(names or (("fsdp",) if full else ("ddp",))))
    base = plan_of_one(model, traced, options)
    data = DataDegree(strategy=DATA[name], degree=context.ranks)
    only = Assignment(name="model", stage=0, data=data, tensor=UNSPLIT)
    memory = base.prediction.memory_bytes_per_rank * context.ranks
    return replace(
        base, strategy=name, gpus=context.ranks, components=(only,), stages=(Stage(ranks=tuple(range(context.ranks))),),
        prediction=replace(base.prediction, memory_bytes_per_rank=memory), notes=(f"the model runs whole: {why}",),
    )  # fmt: skip


def _stored_plan(context: RankContext, traced: TracedModel, call: Call | None, options: PlanOptions) -> StoredPlan:
    if options.cache is None or call is None:
        return StoredPlan(path=None)
    leaves = pytree.tree_leaves((call.args, call.options))
    inputs = [[str(t.dtype), *t.shape[1:]] if isinstance(t, Tensor) else type(t).__name__ for t in leaves]
    return StoredPlan.for_request(
        context, options, whole=traced.model_fingerprint, call=inputs, names=sorted(call.options),
        parts=not options.no_shards_because,
    )  # fmt: skip


class ModelTemplate:
    """A model without its weights, as a template for complete ones."""

    def __init__(self, model: nn.Module) -> None:
        self._model, _ = with_parameters(model, [model], lambda p: p.detach().to("meta"))

    def copy(self) -> nn.Module:
        """A model with small random weights (a trace compares outputs, which must not all be equal)."""
        generator = torch.Generator().manual_seed(0)
        model, _ = with_parameters(
            self._model, [self._model], lambda p: torch.randn(p.shape, generator=generator).mul_(0.02).to(p.dtype)
        )
        return model


def spare_of(model: nn.Module) -> ModelTemplate | None:
    """A template of the model, in case it must be distributed again; None if it cannot be copied. It is needed if
    ``forward`` takes more than one input, or if the model has methods of its own."""
    try:
        return ModelTemplate(model)
    except Exception:  # a model's own code may raise anything when it is copied
        return None


def _carry_over(model: DistributedModel, fresh: nn.Module) -> None:
    """Set the numbers and texts in attributes of ``model`` and its layers, which a program may have changed since the
    template was made, in ``fresh``. Of torch's layers, whose parts have other sizes, only the rate of dropout."""
    for path, module in model.origin.named_modules():
        target, torchs = vars(fresh.get_submodule(path)), type(module).__module__.startswith("torch.")
        for key, value in vars(part_of(model, module) if path else module).items():
            own = key == "p" if torchs else not key.startswith("_") and key != "training"
            if own and key in target and isinstance(value, int | float | complex | str | None):
                target[key] = value


def rebuild(
    model: DistributedModel, why: str, fresh: nn.Module, build: Callable[[Plan, TracedModel], ParallelModel],
    options: PlanOptions, rebindings: Sequence[Rebinding],
) -> ParallelModel:  # fmt: skip
    """Convert the distributed model to one component, under the form of data parallelism closest to its plan
    (collective). Weights and the optimizer's state are kept; parameters are new objects."""
    context, old = model.rank_context, model.parallel
    assert old is not None
    assert model.names is not None
    fresh.train(model.training)
    _carry_over(model, fresh)
    weights = model.names.full(old)
    states = [FullStates.of(old, r.optimizer) for r in rebindings]
    traced = called(fresh, name=spec_of(model.origin), reason=why)
    sharded = any(a.data.strategy in ("zero2", "zero3", "hsdp") for a in old.plan.components)
    names = allowed_strategies(options, why) or (("fsdp",) if sharded else ("ddp",))
    plan = by_hand(context, fresh, traced, options, names, why)
    say(context, f"the model runs whole under {plan.strategy} from now on: {why}")
    fresh.load_state_dict({name: value for name, value in weights.items() if name in fresh.state_dict()}, strict=False)
    parallel = build(plan, traced)
    model.__dict__["origin"] = fresh
    model.__dict__["names"] = StateNames(fresh)
    for rebinding, state in zip(rebindings, states, strict=True):
        rebinding.apply(parallel, TensorViews(parallel))
        state.load(parallel, rebinding.optimizer)
    old.close()
    return parallel
