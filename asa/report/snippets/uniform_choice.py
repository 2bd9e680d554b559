"""Replacement of a plan for tools that know one strategy for the whole network: the plan itself, or the best they can
run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Literal

from asa.errors import UsageError
from asa.ir.plan import DataDegree, Plan, Stage, TensorDegree
from asa.report.snippets.grid import STAGED, Grid, grid_of
from asa.report.snippets.left_out import left_out
from asa.report.units import percent, seconds

_DATA = {"replicate": "ddp", "zero1": "zero1", "zero2": "zero2", "zero3": "fsdp", "hsdp": "hsdp"}
_SPLITS_BLOCKS = ("torchtitan", "megatron")
"""Tools that also split attention and vocabulary of their language models."""
_WHOLE = (*_DATA.values(), "tensor", *STAGED)


def name_of(plan: Plan) -> str | None:
    """The whole strategy that equals the plan; None if components or stages differ."""
    ranks = plan.num_ranks
    if ranks == 1:
        return "single"
    if any(s.weights for s in plan.stages) or any(c.tensor.strategy == "sequence" for c in plan.components):
        return None
    if plan.strategy in _WHOLE and (plan.strategy not in STAGED or all(len(s.ranks) == 1 for s in plan.stages)):
        return plan.strategy  # the strategy itself also runs unsupported components whole
    data = {c.data.strategy for c in plan.components}
    degrees = {c.data.degree for c in plan.components}
    tensor = {c.tensor.degree for c in plan.components}
    if len(plan.stages) > 1:
        one_each = all(len(s.ranks) == 1 for s in plan.stages)
        return plan.schedule if one_each else None
    if tensor == {1} and degrees == {ranks} and len(data) == 1:
        return _DATA[data.pop()]
    if degrees == {1} and tensor <= {1, ranks} and ranks in tensor:
        return "tensor"
    return None


@dataclass(frozen=True)
class Choice:
    """The strategy that a tool runs instead of a plan. ``notes``: sentences on what is lost."""

    name: str
    notes: tuple[str, ...]

    @property
    def exact(self) -> bool:
        """Whether it equals the plan."""
        return not self.notes

    def on_used_ranks(self, plan: Plan) -> Plan:
        """``plan`` on the number of ranks that the strategy uses: one for a single device."""
        return _on_used_ranks(plan, self.name)


def _on_used_ranks(plan: Plan, name: str) -> Plan:
    if name != "single" or plan.num_ranks == 1:
        return plan
    data, tensor = DataDegree(strategy="replicate", degree=1), TensorDegree(strategy="none", degree=1)
    components = tuple(replace(c, stage=0, data=data, tensor=tensor) for c in plan.components)
    return replace(plan, components=components, stages=(Stage(ranks=(0,)),), schedule="none")


def choose(
    plan: Plan,
    able: Collection[str],
    tool: str,
    *,
    recompute: Literal["each", "all", "none"],
    grids: Callable[[Grid], bool] = lambda _grid: False,
) -> Choice:
    """The strategy with which ``tool``, able to run the whole strategies ``able``, replaces ``plan``: the same if
    possible, else the fastest fitting baseline of one stage (for several stages no plan gives the cuts). ``recompute``:
    whether the tool can recompute ``each`` component separately, only ``all`` of them, or none. ``grids``: whether it
    runs a uniform grid that is no whole strategy, which is then called ``hybrid``.

    Raises:
        UsageError: none of them fits.
    """
    if plan.groups > 1:
        raise UsageError(
            f"{tool} has no groups of ranks that train apart ({plan.consistency}); export the plan of one group: "
            f"asa plan {plan.model_spec} --gpus {plan.num_ranks} --global-batch {plan.global_batch // plan.groups}"
        )
    own_name, grid = name_of(plan), grid_of(plan)
    if own_name not in able and grid is not None and max(grid.tensor, grid.stages) > 1 and grids(grid):
        able, own_name = (*able, "hybrid"), "hybrid"
    recomputed = [c.name for c in plan.components if c.checkpoint]
    notes = []
    if recomputed and recompute == "none":
        notes.append(f"{tool} recomputes nothing by itself, the plan {len(recomputed)} components: expect more memory")
    elif len(recomputed) not in (0, len(plan.components)) and recompute == "all":
        notes.append(f"{tool} recomputes all blocks or none: the plan recomputes {len(recomputed)} of them")
    if own_name in able:
        assert own_name is not None
        whole_blocks = tool in _SPLITS_BLOCKS and len(plan.input_shape) == 1
        if own_name == "tensor" and not whole_blocks:
            split = sum(c.tensor.degree > 1 for c in plan.components)
            notes.append(
                f"{tool} splits linear layers only: convolutions and attention in the {split} components that "
                "the plan splits stay whole"
            )
        return Choice(own_name, (*notes, *left_out(plan, own_name, tool)))
    usable = [name for name in able if name not in (*STAGED, "tensor")]
    fitting = [b for b in plan.baselines if b.name in usable and b.fits and b.step_time_s is not None]
    best = min(fitting, key=lambda b: b.step_time_s or 0.0, default=None)
    if best is None or best.step_time_s is None:
        raise UsageError(
            f"{tool} cannot run this plan ({_why(plan, own_name)}), and none of the baselines it could run fits: "
            f"{', '.join(sorted(usable))}"
        )
    promised = plan.prediction.step_time_s
    loss = f"{seconds(best.step_time_s)} a step predicted, {seconds(promised)} under the plan"
    notes.insert(
        0,
        f"{tool} cannot express {_why(plan, own_name)}: this is {best.name}, {loss} "
        f"({percent(best.step_time_s / promised - 1, signed=True)})",
    )
    return Choice(best.name, (*notes, *left_out(_on_used_ranks(plan, best.name), best.name, tool)))


def _why(plan: Plan, own_name: str | None) -> str:
    """Description of the plan that says why the tool cannot run it."""
    if own_name is not None:
        return f"the whole strategy {own_name}"
    layouts = dict.fromkeys(
        (c.data.strategy, c.data.degree, c.tensor.degree, len(plan.stages[c.stage].ranks)) for c in plan.components
    )
    tokens = " and tokens" if any(c.tensor.strategy == "sequence" for c in plan.components) else ""
    stages = f"{len(plan.stages)} stages of {'/'.join(str(len(s.ranks)) for s in plan.stages)} ranks, "
    kinds = ", ".join(f"{s} x{d}" + (f" with tensors{tokens} x{t}" if t > 1 else "") for s, d, t, _ in layouts)
    return f"{stages if len(plan.stages) > 1 else ''}a layout per component ({kinds})"
