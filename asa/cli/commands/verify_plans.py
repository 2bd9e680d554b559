"""``asa plan --verify K``: runs the most promising plans against each other here, and chooses by the measurements."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from asa.cli import bench_setup
from asa.cli.console import Console
from asa.errors import UnavailableError
from asa.ir import codec
from asa.ir.cluster import Cluster
from asa.ir.plan import Certificate, Confidence, Measured, Plan, Trial
from asa.ir.profile import Profile
from asa.strategies import offered

if TYPE_CHECKING:
    import numpy as np

    from asa.executor.measuring.benchmark import Cell
    from asa.planner import Request
    from asa.planner.answer.posterior import Belief

BUDGET_S = 60.0
FEWEST = 2
ENOUGH = 0.005
"""Expected regret below which measuring stops."""


def check(cluster: Cluster, gpus: int, console: Console) -> None:
    """Check that plans for ``gpus`` devices of ``cluster`` can be measured on this machine, before any search.

    If CPU ranks must share cores, prints a note.

    Raises:
        UnavailableError: too few CUDA devices.
    """
    from asa.launch import cuda_devices, usable_cores

    if cluster.device.type == "cuda" and cuda_devices() < gpus:
        raise UnavailableError(
            f"--verify needs the {gpus} CUDA devices of the plan, this machine has {cuda_devices()}; run it on the "
            "machine it is for, or leave out --verify"
        )
    if cluster.device.type == "cpu" and usable_cores() < gpus:
        console.say(f"asa: {gpus} ranks share {usable_cores()} cores: times are those of this machine, not of {gpus}")


def verify(
    profile: Profile, cluster: Cluster, request: Request, count: int, budget_s: float, console: Console
) -> list[Plan]:
    """Plan, run up to ``count`` finalists for ``budget_s`` seconds; returns the plans with the chosen one first.

    Raises:
        WorkersFailedError: a rank died. Others as :func:`asa.planner.plan`.
    """
    from asa.cost.work.spread import drift
    from asa.planner.answer.posterior import NOISE, Policy, choose
    from asa.planner.questions.finalists import finalists

    plans, draws, stock = finalists(profile, cluster, offered(), request, count)
    plans, draws = _side_by_side(plans, draws, cluster, console)
    stock = None if stock is None or stock >= len(plans) else stock
    if len(plans) < FEWEST:
        console.say("asa: nothing to verify: no second plan differs from it")
        return plans
    always = (0, stock or 1)
    table = tuple(tuple(float(x) for x in row) for row in draws)
    noise = max(NOISE, drift(profile))
    policy = Policy(draws=table, always=always, enough=ENOUGH, noise=noise)
    began = time.monotonic()
    cells, rounds, steps = _run(plans, profile, cluster, policy, budget_s, console)
    seconds = time.monotonic() - began
    best, before, after = choose(draws, rounds, stock, noise=noise)
    measured = _measured(plans, cells, steps, seconds, best, before, after, cluster)
    chosen = replace(_as_answer(plans[0], plans[best], _verdict(plans, best, measured)), measured=measured)
    others = [p for p in plans if p.conduct != chosen.conduct]
    return [chosen, *others[: request.top_k - 1]]


def _side_by_side(
    plans: list[Plan], draws: np.ndarray, cluster: Cluster, console: Console
) -> tuple[list[Plan], np.ndarray]:
    """The first plans, as many as fit into memory together, since all of them stay there."""
    from asa.profiler.machine import choose_device, free_memory

    free = free_memory(choose_device(cluster.device.type))
    memory_bytes, count = 0, 0
    for p in plans:
        peaks = p.prediction.memory_bytes_per_rank
        memory_bytes += sum(peaks) if cluster.device.type == "cpu" else max(peaks)
        if memory_bytes > 0.9 * free:
            break
        count += 1
    if count < len(plans):
        console.say(f"asa: {count} of {len(plans)} finalists fit into memory side by side; the others are not measured")
    return plans[:count] or plans[:1], draws[: max(1, count)]


def _run(
    plans: Sequence[Plan], profile: Profile, cluster: Cluster, policy: Any, budget_s: float, console: Console
) -> tuple[list[Cell], list[dict[int, float]], list[int]]:
    from asa.executor.measuring.benchmark import BenchOptions
    from asa.executor.measuring.contest import contest
    from asa.zoo.models import build

    graph = profile.graph
    shape = graph.input_shape
    factory = partial(build, profile.model_spec, num_classes=graph.num_classes, input_shape=shape, seed=0)
    options = BenchOptions(device=cluster.device.type, budget_s=budget_s)
    with console.progress(f"measuring {len(plans)} plans of {profile.model_spec}") as report:

        def on_message(_rank: int, message: Mapping[str, float]) -> None:
            report(min(1.0, 1 - message["left_s"] / budget_s), f"round {message['round']:.0f}")

        return contest(
            plans, factory, offered(), partial(bench_setup.stand_in, shape, graph.num_classes), options, policy,
            on_message=on_message,
        )  # fmt: skip


def _measured(
    plans: Sequence[Plan], cells: Sequence[Cell], steps: Sequence[int], seconds: float, best: int,
    before: Belief, after: Belief, cluster: Cluster,
) -> Measured:  # fmt: skip
    from asa.report.text.plan import summary

    machine = bench_setup.machine(cluster.device.type, max(p.num_ranks for p in plans))

    def confidence(belief: Belief, plan: int) -> Confidence:
        from asa.planner.answer.posterior import DRAWS

        return Confidence(
            p_best=belief.p_best[plan], expected_regret=belief.expected_regret[plan], finalists=len(plans), draws=DRAWS
        )  # fmt: skip

    return Measured(
        step_time_s=cells[best].step_time,
        steps=steps[best],
        seconds=seconds,
        created=codec.now(),
        device_type=machine.device_type,
        device_name=machine.device_name,
        num_devices=machine.num_devices,
        cpu_cores=machine.cpu_cores,
        torch_version=machine.torch_version,
        asa_version=machine.asa_version,
        before=confidence(before, 0),
        after=confidence(after, best),
        trials=tuple(
            Trial(
                strategy=p.strategy,
                runs=summary(p.components),
                predicted_s=p.prediction.step_time_s,
                step_time_s=cell.step_time if cell.steps else None,
                p_best_before=before.p_best[i],
                p_best_after=after.p_best[i],
            )
            for i, (p, cell) in enumerate(zip(plans, cells, strict=True))
        ),
    )


def _verdict(plans: Sequence[Plan], best: int, measured: Measured) -> str:
    """Sentence on what the measurements changed."""
    first = measured.trials[0].step_time_s
    verdict = "measured: the plan stays"
    if best and first is not None:
        longer = first.median / measured.step_time_s.median - 1
        name = plans[best].strategy if plans[best].strategy != "asa" else "another plan"
        verdict = f"measured: {name} instead of the plan the costs alone gave, which took {100 * longer:.2g} % longer"
    return (
        f"{verdict}; P(best) {100 * measured.before.p_best:.0f} % before and {100 * measured.after.p_best:.0f} % "
        f"after, expected regret {100 * measured.before.expected_regret:.2g} % before and "
        f"{100 * measured.after.expected_regret:.2g} % after"
    )


def _as_answer(first: Plan, best: Plan, note: str) -> Plan:
    """``best`` as the answer in place of ``first``, with its bound and baselines, and as ``asa`` where any plan was
    asked for."""
    if best is first:
        return replace(first, notes=(*first.notes, note))
    answer = best.prediction.step_time_s
    bound = min(first.certificate.lower_bound_s, answer)
    gap = (answer - bound) / answer if answer > 0 else 0.0
    certificate: Certificate = replace(
        first.certificate,
        status="optimal" if gap <= 1e-6 else "feasible",
        lower_bound_s=bound,
        gap=0.0 if gap <= 1e-6 else gap,
    )
    notes = tuple(n for n in best.notes if not n.startswith("stay with"))
    return replace(
        best, strategy="asa" if first.strategy == "asa" else best.strategy, certificate=certificate,
        baselines=first.baselines, notes=(note, *notes),
    )  # fmt: skip
