"""The plan on which all ranks of the user's program agree. It is made once, and stored for the next time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import asa
from asa.api.messages import naming_arguments, say
from asa.api.plans.planning import (
    device_of,
    known_clusters,
    measured,
    named_cluster,
    nearest_cluster,
    spec_of,
)
from asa.api.plans.requests import PlanOptions, plan_again, request_of, runnable
from asa.api.rank_context import RankContext
from asa.errors import AsaError, InvalidInputError, UsageError, place_of
from asa.ir import codec
from asa.ir.cluster import Cluster, Device, alone
from asa.ir.plan import ONE_COPY, UNSPLIT, Assignment, Certificate, Plan, Prediction, Stage
from asa.ir.profile import Profile
from asa.launch import faults
from asa.planner import Request, check_request, parse_pin, usual_limit
from asa.planner import plan as solve
from asa.planner.space.baselines import names as strategy_names
from asa.reading import user_cache
from asa.scheduler import Model
from asa.scheduler.background import BackgroundSearch
from asa.scheduler.model import Asked, Question
from asa.strategies import offered
from asa.tracing import TracedModel, trace
from asa.tracing.tracer import reason_of

_LINKS_SHARE, _LINKS_S = 0.4, 20.0
"""Largest fraction of the time limit, and largest number of seconds, for measuring unknown links between the ranks."""
_LEAST_S = 1.0
"""Smallest number of seconds for measuring the model, however long measuring the links took."""


@dataclass(frozen=True, kw_only=True)
class Origins:
    """The profile and the cluster from which a plan was made."""

    profile: Profile
    cluster: Cluster


def agreed_plan(
    context: RankContext, model: nn.Module, example: Tensor, options: PlanOptions
) -> tuple[Plan, Origins | None]:
    """(plan, origins) for all ranks: rank 0 profiles and plans, or reads the plan from the cache, and sends it to the
    others (collective).

    Raises:
        AsaError: raised on rank 0, and then on every rank.
    """
    votes, started = context.votes, time.perf_counter()
    stored = votes.once(lambda: StoredPlan.of(context, model, example, options))
    result = stored.read() if stored is not None else None
    if not votes.tell(result is not None):
        votes.once(lambda: _check_request(context, options))
        cluster = _cluster(context, options)
        remaining = replace(options, time_limit_s=max(_LEAST_S, options.time_limit_s - (time.perf_counter() - started)))
        say(context, f"measuring the model, for up to {remaining.time_limit_s:.0f} s; {_kept(options.cache)}")
        result = votes.once(lambda: _measure_and_plan(context, model, example, remaining, cluster))
        if result is not None and stored is not None:
            stored.write(*result)
    text = votes.tell(None if result is None else codec.dumps(result[0]))
    agreed = codec.loads(Plan, text, source="the plan from rank 0")
    if context.rank == 0:
        for line in _notes_on(agreed, options):
            warnings.warn(line, stacklevel=3)
    return agreed, None if result is None else result[1]


def _kept(cache: Path | None) -> str:
    """Whether what is measured is stored in the folder ``cache``, in words."""
    if cache is None:
        return "nothing is kept for the next time"
    folder = next(p for p in (cache, *cache.parents) if os.path.exists(p))
    if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
        return "the plan is kept for the next time"
    return f"nothing is kept for the next time, as {folder} cannot be written: name another folder with cache=DIR"


def _notes_on(plan: Plan, options: PlanOptions) -> list[str]:
    """Notes on what the plan does not provide."""
    notes = []
    if options.no_shards_because and options.strategies is None and plan.num_ranks > 1:
        notes.append(f"{options.no_shards_because}, so every rank keeps all parameters whole, and its state too")
    idle = plan.num_ranks > 1 and all(layout.data == layout.tensor == 1 for layout in plan.layouts())
    if idle and len(plan.stages) == 1 and options.strategies != ("single",):
        notes.append(
            f"the plan is for one device: each of the {plan.num_ranks} ranks computes the whole batch, which is faster "
            "than sharing it would be; strategies=('ddp',) shares it all the same"
        )
    return notes


@naming_arguments()
def _check_request(context: RankContext, options: PlanOptions) -> None:
    """Check requests that must be refused whatever a measurement of links or model would show."""
    pins = tuple(parse_pin(text) for text in options.pins)
    request = Request(gpus=context.ranks, global_batch=options.global_batch, strategies=options.strategies, pins=pins)
    named = None if options.cluster is None or context.ranks == 1 else named_cluster(options.cluster, context.ranks)
    check_request(named, offered(), request)


@naming_arguments()
def _cluster(context: RankContext, options: PlanOptions) -> Cluster | None:
    """The links; if nothing is known of them, they are measured now between these ranks (collective)."""
    if context.ranks == 1:
        return None
    path = links_file(context, options)
    stored = _read_links(path) if context.rank == 0 and options.cluster is None else None
    is_known = (
        context.rank != 0 or options.cluster is not None or stored is not None or _measured_cluster(context) is not None
    )
    if context.votes.everyone(is_known):
        return stored
    from asa.profiler.interconnect import measure_group

    limit = min(_LINKS_S, _LINKS_SHARE * options.time_limit_s)
    say(context, f"measuring the links between {context.ranks} ranks, for about {limit:.0f} s")
    threads = torch.get_num_threads()
    if context.device.type == "cpu":
        torch.set_num_threads(1)
    try:
        measured_now = measure_group(backend="nccl" if context.device.type == "cuda" else "gloo", time_limit_s=limit)
    finally:
        torch.set_num_threads(threads)
    if context.rank == 0 and path is not None:
        with contextlib.suppress(OSError):
            codec.save(measured_now, path)
    return measured_now


def links_file(context: RankContext, options: PlanOptions) -> Path | None:
    """Path of the stored links between this number of ranks on such a machine; None without a cache."""
    if options.cache is None:
        return None
    from asa.profiler.machine import device_record

    where = [device_record(context.device).name, context.ranks, context.device.type, platform.node(), torch.__version__]
    key = hashlib.sha256(json.dumps(where).encode()).hexdigest()[:16]
    return options.cache / f"links.{key}.cluster.json"


def _read_links(path: Path | None) -> Cluster | None:
    if path is None:
        return None
    try:
        return codec.load(Cluster, path)
    except InvalidInputError:
        return None


def _measured_cluster(context: RankContext) -> Cluster | None:
    """A stored cluster that was measured on such devices and has enough of them; None if there is none."""
    from asa.profiler.machine import device_record

    name = device_record(context.device).name
    fits = [c for c in known_clusters() if c.device.name == name and c.num_devices >= context.ranks]
    return min(fits, key=lambda c: c.num_devices, default=None)


@naming_arguments()
def _measure_and_plan(
    context: RankContext, model: nn.Module, example: Tensor, options: PlanOptions, cluster: Cluster | None
) -> tuple[Plan, Origins]:
    try:
        profile = measured(
            model, example, num_classes=None, global_batch=options.global_batch, precision=options.precision,
            limit_s=options.time_limit_s, max_degree=context.ranks, device=context.device,
        )  # fmt: skip
    except AsaError:
        raise
    except Exception as error:  # a model's own code may raise anything on a batch of another size
        raise InvalidInputError(
            f"the model cannot be measured on batches of several sizes: {reason_of(error)}{place_of(error)}; have it "
            "take any number of samples, whatever it was given before"
        ) from error
    cluster = _links(context, options, cluster, profile)
    return on_all_ranks(profile, cluster, context.ranks, options), Origins(profile=profile, cluster=cluster)


def _links(context: RankContext, options: PlanOptions, cluster: Cluster | None, profile: Profile) -> Cluster:
    """The links: just measured (``cluster``), named, measured before, or those of the most similar machine."""
    if cluster is not None:
        return cluster
    if context.ranks == 1:
        device = profile.device
        return alone(Device(name=device.name, type=device.type, memory_bytes=device.memory_bytes))
    if options.cluster is not None:
        return named_cluster(options.cluster)
    return _measured_cluster(context) or nearest_cluster(profile.device, context.ranks)


def named_or_measured(context: RankContext, options: PlanOptions) -> Callable[[Profile], Cluster]:
    """A function that returns the links for a profile. Links that are unknown are measured now (collective). The
    function is called on rank 0."""
    cluster = _cluster(context, options)
    return lambda profile: _links(context, options, cluster, profile)


def cost_model(origins: Origins, options: PlanOptions) -> Model:
    """The cost model of a plan, with a search by which :class:`asa.Job` plans again. Its plans may have stages and idle
    ranks."""
    model = Model(
        profile=origins.profile, cluster=origins.cluster, strategies=offered(),
        solve=partial(plan_again, replace(options, pipelines=True)),
    )  # fmt: skip
    return replace(model, background=partial(_search, model))


def _search(model: Model, question: Question) -> Asked:
    faults.reached("replan.solve")
    return BackgroundSearch(model, question)


def on_all_ranks(profile: Profile, cluster: Cluster, ranks: int, options: PlanOptions) -> Plan:
    """The best plan in which every rank takes part, because ranks that were started cannot be dismissed.

    Raises:
        InfeasibleError: no plan fits.
    """
    strategies, request = request_of(ranks, options, usual_limit(ranks))
    plans = solve(profile, cluster, strategies, request)
    fitting = next((plan for plan in (_widened(p, ranks) for p in runnable(plans, options)) if plan is not None), None)
    if fitting is not None:
        return fitting

    def plain() -> Plan:
        if options.strategies is not None and "ddp" not in options.strategies:
            names = ", ".join(options.strategies)
            raise UsageError(
                f"no plan of {names} gives work to all {ranks} ranks, and none can be dismissed: start fewer, or allow "
                "ddp too"
            )
        return solve(profile, cluster, strategies, replace(request, strategies=("ddp",), top_k=1))[0]

    if options.pipelines:
        return plain()
    # The best plan accumulates over microbatches, which a loop of the user's own does not.
    first = next((p for p in (_widened(plan, ranks) for plan in plans) if p is not None), None)
    if first is None:
        first = plain()
    note = f"planned with {first.num_microbatches} microbatches for their memory; a loop of your own runs them as one"
    return replace(first, num_microbatches=1, notes=(*first.notes, note))


def _widened(plan: Plan, ranks: int) -> Plan | None:
    """``plan`` on all ranks. A plan of one stage may be widened: the extra ranks repeat its work. None if that is not
    possible."""
    if plan.num_processes == ranks:
        return plan
    if len(plan.stages) > 1 or any(ranks % (c.data.degree * c.tensor.degree) for c in plan.components):
        return None
    note = f"{plan.num_ranks} of {ranks} ranks are the fastest; the others repeat their work"
    each = (max(plan.prediction.memory_bytes_per_rank),) * ranks
    return replace(
        plan, stages=(Stage(ranks=tuple(range(ranks))),), gpus=ranks, notes=(*plan.notes, note),
        prediction=replace(plan.prediction, memory_bytes_per_rank=each),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StoredPlan:
    """A stored plan with its origins; without ``path`` nothing is stored. ``links``: those that are known now; a plan
    that was made for others is not used."""

    path: Path | None
    links: Cluster | None = None

    @staticmethod
    def of(context: RankContext, model: nn.Module, example: Tensor, options: PlanOptions) -> StoredPlan:
        """Where the plan for this request is stored."""
        if options.cache is None:
            return StoredPlan(path=None)
        # Traced on its own device, with two samples and without timing.
        traced = trace(model, example.to(device_of(model)), name=spec_of(model))
        return StoredPlan.for_request(
            context, options, model=traced.model_fingerprint, input=list(example.shape[1:]), at_once=options.at_once,
            elementwise=not options.no_shards_because, pipelines=options.pipelines,
        )  # fmt: skip

    @staticmethod
    def for_request(context: RankContext, options: PlanOptions, **details: Any) -> StoredPlan:
        """Where the plan for ``options`` on these ranks and ``details`` of the model is stored."""
        if options.cache is None:
            return StoredPlan(path=None)
        from asa.profiler.machine import device_record

        device, links, named = device_record(context.device), None, None
        if context.ranks > 1 and options.cluster is None:
            links = _read_links(links_file(context, options)) or _measured_cluster(context)
        elif context.ranks > 1 and options.cluster is not None:  # a file may have another content by now
            named = codec.fingerprint(named_cluster(options.cluster))
        request = details | {
            "ranks": context.ranks,
            "batch": options.global_batch,
            "optimizer": options.optimizer,
            "strategies": options.strategies,
            "pins": options.pins,
            "memory": options.memory_bytes,
            "precision": options.precision,
            "cluster": named,
            "device": [device.name, device.memory_bytes],
            "versions": [asa.__version__, torch.__version__],
        }
        key = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:24]
        return StoredPlan(path=options.cache / key, links=links)

    def read(self) -> tuple[Plan, Origins] | None:
        """The stored plan and its origins, if all of them can be used; otherwise None."""
        if self.path is None:
            return None
        try:
            profile, cluster = codec.load(Profile, self._file("profile")), codec.load(Cluster, self._file("cluster"))
            plan = codec.load(Plan, self._file("plan"))
        except InvalidInputError:
            return None
        stale = plan.profile_fingerprint != codec.fingerprint(profile) or (self.links or cluster) != cluster
        return None if stale else (plan, Origins(profile=profile, cluster=cluster))

    def write(self, plan: Plan, origins: Origins) -> None:
        """Store the plan and its origins. If that fails, the plan is made again next time."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                codec.save(origins.profile, self._file("profile"))
                codec.save(origins.cluster, self._file("cluster"))
                codec.save(plan, self._file("plan"))

    def _file(self, what: str) -> Path:
        assert self.path is not None
        return self.path.with_name(f"{self.path.name}.{what}.json")


def usual_cache() -> Path:
    """Default folder for plans of the user's own programs."""
    return user_cache() / "plans"


def plan_of_one(model: nn.Module, traced: TracedModel, options: PlanOptions) -> Plan:
    """The plan for one rank of a model called as a whole. There is no choice, so nothing is measured."""
    components = tuple(Assignment(name=c.name, stage=0, data=ONE_COPY, tensor=UNSPLIT) for c in traced.components)
    return Plan(
        model_spec=spec_of(model), model_fingerprint=traced.model_fingerprint, profile_fingerprint="0" * 16,
        cluster="alone", cluster_fingerprint="0" * 16, input_shape=(1,),
        num_classes=1, strategy="single", gpus=1, global_batch=options.global_batch,
        precision=options.precision, optimizer=options.optimizer,
        device_type="cuda" if device_of(model).type == "cuda" else "cpu", components=components,
        stages=(Stage(ranks=(0,)),), schedule="none", num_microbatches=1,
        prediction=Prediction(
            step_time_s=0.0, step_time_low_s=0.0, step_time_high_s=0.0, compute_s=0.0, exposed_communication_s=0.0,
            hidden_communication_s=0.0, update_s=0.0, bubble_s=0.0, memory_bytes_per_rank=(0,), samples_per_s=0.0,
        ),
        certificate=Certificate(
            solver="none", status="optimal", lower_bound_s=0.0, gap=0.0, space="one device, one stage", solve_s=0.0
        ),
        baselines=(), origin="estimated", notes=("one rank: nothing to plan, nothing was measured",),
    )  # fmt: skip


def checked_plan(context: RankContext, plan: Plan | Path | str) -> Plan:
    """The plan that rank 0 was given, checked, on all ranks.

    Raises:
        UsageError: it is for another number of ranks.
        InvalidInputError: the file cannot be used.
    """
    error: AsaError | None = None
    local_plan: Plan | None = None
    try:
        if isinstance(plan, str) and plan in strategy_names(offered(), context.ranks):
            raise UsageError(f"plan={plan!r} is no file: strategies={plan!r} asks for a plan of this strategy")
        local_plan = plan if isinstance(plan, Plan) else codec.load(Plan, Path(plan))
    except AsaError as caught:
        error = caught
    if local_plan is not None and local_plan.num_processes != context.ranks:
        needed = local_plan.num_processes
        error = UsageError(
            f"the plan is for {needed} ranks, there are {context.ranks}; start {needed} "
            f"(torchrun --nproc-per-node {needed}), or plan with gpus={context.ranks}"
        )
    context.votes.agree(error)
    text: Any = context.votes.tell(None if local_plan is None else codec.dumps(local_plan))
    return codec.loads(Plan, text, source="the plan from rank 0")
