"""Optimizers that use all elements of a parameter, or several parameters, together: refused, or doubted, where a plan
that is handed in cuts one or divides updates."""

from __future__ import annotations

import warnings
from typing import Any

import torch

import asa
from asa.errors import UsageError
from asa.ir.plan import Plan
from asa.launch import run_ranks
from planner_tests import user_programs as user
from planner_tests.hand_plans import uniform
from planner_tests.test_api_job import loss_fn, pipeline
from planner_tests.test_api_loop import in_float64, plan_of


class Normed(torch.optim.SGD):
    """Its steps are of one length per parameter; asa cannot know."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """A rank with a part of ``p`` would take another step."""
        for p in (p for g in self.param_groups for p in g["params"] if p.grad is not None):
            p.sub_(p.grad / p.grad.norm().clamp(min=1e-6), alpha=0.01)


def said(rank: int, plans: list[Plan]) -> list[tuple[str, str]]:
    found = []
    for plan in plans:
        for kind in (torch.optim.Adafactor, Normed, torch.optim.Adagrad):
            for job in (False, True):
                net = user.model()
                opt = kind(net.parameters(), lr=0.01)
                with warnings.catch_warnings(record=True) as heard:
                    warnings.simplefilter("always")
                    error = ""
                    try:
                        if job:
                            asa.Job(net, opt, user.loader(), loss_fn, plan).close()
                        elif len(plan.stages) == 1:
                            asa.parallelize(net, opt, user.loader(), plan=plan)
                    except UsageError as refused:
                        error = str(refused)
                doubts = ("cuts parameters", "some of the parameters")
                found.append((error, " ".join(t for w in heard if any(d in (t := str(w.message)) for d in doubts))))
    return found


def test_parts_are_only_updated_by_what_updates_element_by_element() -> None:
    whole = [in_float64(plan_of(uniform(2, 1), "replicate")), in_float64(plan_of(uniform(2, 1), "zero1")), pipeline()]
    cut = [in_float64(plan_of(uniform(1, 2))), in_float64(plan_of(uniform(2, 1), "zero3"))]
    for answers in run_ranks(2, said, [*whole, *cut], threads=1, timeout_s=120):
        of_wholes, of_parts = answers[: 6 * len(whole)], answers[6 * len(whole) :]
        of_several = of_wholes[8:10]  # under zero1
        assert all("correct only if Normed updates each parameter by itself" in w and not e for e, w in of_several)
        assert set(of_wholes[:8] + of_wholes[10:]) == {("", "")}
        for i in range(0, len(of_parts), 6):
            known, doubted, fine = of_parts[i : i + 2], of_parts[i + 2 : i + 4], of_parts[i + 4 : i + 6]
            assert all(e.startswith("Adafactor uses all elements of a parameter together") and not w for e, w in known)
            assert all("correct only if Normed updates element by element" in w and not e for e, w in doubted)
            assert fine == [("", "")] * 2
