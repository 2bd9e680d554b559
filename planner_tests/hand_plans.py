"""Plans written by hand: one layout per component, no planner involved."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache

import torch
from torch import nn

from asa.errors import UsageError
from asa.ir.plan import Assignment, Certificate, DataDegree, Plan, Prediction, Stage, TensorDegree
from asa.sharding.layers.propagate import SplitPlan
from asa.sharding.layers.tensor import plan_split, sequence_plans
from asa.tracing import TracedModel, trace
from planner_tests.small_models import INPUT, build

Choose = Callable[[int, str], tuple[int, int]]
"""(index, name) of a component to its (data, tensor) degrees."""


def traced(model: nn.Module, input_shape: tuple[int, ...]) -> TracedModel:
    """The model's components."""
    return trace(model, torch.zeros((2, *input_shape)), name="model")


@cache
def model_of(name: str, *, even: bool = False) -> TracedModel:
    """The small model of a name, traced once for all plans of it."""
    return traced(build(name, even=even), INPUT)


def copy_of(name: str, *, even: bool = False) -> TracedModel:
    """A copy of :func:`model_of`, for a rank to change. It takes a tenth of the time of a trace."""
    return copy.deepcopy(model_of(name, even=even))


def hand_plan(
    model: nn.Module | TracedModel, width: int, choose: Choose, *, input_shape: tuple[int, ...], num_classes: int,
    data_strategy: Callable[[int], str] = lambda _i: "replicate", global_batch: int = 12,
    num_microbatches: int = 1, optimizer: str = "sgd", spec: str = "model",
    by_tokens: Callable[[int], bool] = lambda _i: False, example: torch.Tensor | None = None,
) -> Plan:  # fmt: skip
    """A plan of one stage; components that cannot be split that far run whole, on the same data degree. ``by_tokens``:
    which of those that are split cut their tokens, too, where they can. ``example``: an input to trace with, where
    zeros in float32 are none. A model that was traced already is compared and weighed here, so not again by ranks."""
    components = []
    if isinstance(model, TracedModel):
        found = model
    else:
        found = traced(model, input_shape) if example is None else trace(model, example, name="model")
    for i, c in enumerate(found.components):
        data, tensor = choose(i, c.name)
        try:
            split = plan_split(c)[0]
        except UsageError:  # shapes that depend on values
            split = SplitPlan()
        tensor = tensor if split.actions and tensor <= split.max_degree else 1
        sequence = tensor > 1 and by_tokens(i) and sequence_plans(c) is not None
        components.append(
            Assignment(
                name=c.name,
                stage=0,
                data=DataDegree(strategy=data_strategy(i), degree=data),
                tensor=TensorDegree(
                    strategy="sequence" if sequence else "tensor" if tensor > 1 else "none", degree=tensor
                ),
            )
        )
    return Plan(
        model_spec=spec, model_fingerprint=found.model_fingerprint, profile_fingerprint="", cluster="none",
        cluster_fingerprint="", input_shape=input_shape, num_classes=num_classes, strategy="asa", gpus=width,
        global_batch=global_batch, precision="fp32", optimizer=optimizer, device_type="cpu",  # type: ignore[arg-type]
        components=tuple(components), stages=(Stage(ranks=tuple(range(width))),), schedule="none",
        num_microbatches=num_microbatches,
        prediction=Prediction(
            step_time_s=1.0, step_time_low_s=1.0, step_time_high_s=1.0, compute_s=1.0, exposed_communication_s=0.0,
            hidden_communication_s=0.0, update_s=0.0, bubble_s=0.0, memory_bytes_per_rank=(1,) * width,
            samples_per_s=1.0,
        ),
        certificate=Certificate(solver="hand", status="feasible", lower_bound_s=0.0, gap=1.0, space="", solve_s=0.0),
        baselines=(), origin="measured",
    )  # fmt: skip


def uniform(data: int, tensor: int) -> Choose:
    """The same layout everywhere."""
    return lambda _i, _name: (data, tensor)


def alternating(width: int, *, shift: int = 0) -> Choose:
    """Every layout of the width in turn, so that neighbours differ."""
    layouts = [(d, t) for d in range(width, 0, -1) for t in range(width, 0, -1) if width % (d * t) == 0]
    return lambda i, _name: layouts[(i * 2 + shift) % len(layouts)]
