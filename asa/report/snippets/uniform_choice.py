"""Replacement of a plan for tools that know one strategy for the whole network: the plan itself, or the best they can
run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Literal

from asa.errors import UsageError
from asa.ir.plan import Baseline, DataDegree, DataStrategyName, Plan, Stage, TensorDegree
from asa.report.snippets.grid import STAGED, Grid, grid_of
from asa.report.snippets.left_out import left_out
from asa.report.units import percent, seconds

_DATA: dict[DataStrategyName, str] = {
    "replicate": "ddp", "zero1": "zero1", "zero2": "zero2", "zero3": "fsdp", "hsdp": "hsdp",
}  # fmt: skip
_SPLITS_BLOCKS = ("torchtitan", "megatron")
"""Tools that also split attention and vocabulary of their language models."""
_WHOLE = (*_DATA.values(), "tensor", *STAGED)
_UNCLEAR = (*STAGED, "tensor", "hsdp")
"""Baselines of which a plan does not say enough to write them: cuts, what is split, shards."""


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
    """The strategy that a tool runs instead of a plan. ``notes``: sentences on what is lost. ``baseline``: the whole
    strategy that replaces the plan, if it is another; ``per_node``: ranks on each machine, if there are several."""

    name: str
    notes: tuple[str, ...]
    baseline: Baseline | None = None
    per_node: int | None = None

    @property
    def exact(self) -> bool:
        """Whether it equals the plan."""
        return not self.notes

    def as_run(self, plan: Plan) -> Plan:
        """``plan``, or the whole strategy that replaces it, on as many ranks and in as many microbatches as were
        priced."""
        return plan if self.baseline is None else _as_baseline(plan, self.baseline)


def _as_baseline(plan: Plan, baseline: Baseline) -> Plan:
    ranks = 1 if baseline.name == "single" else plan.gpus
    strategies = {name: data for data, name in _DATA.items()}
    data = DataDegree(strategy=strategies.get(baseline.name, "replicate"), degree=ranks)
    tensor = TensorDegree(strategy="none", degree=1)
    components = tuple(replace(c, stage=0, data=data, tensor=tensor, checkpoint=False) for c in plan.components)
    return replace(
        plan, components=components, stages=(Stage(ranks=tuple(range(ranks))),), schedule="none",
        num_microbatches=baseline.num_microbatches,
    )  # fmt: skip


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
    if own_name in able:
        assert own_name is not None
        notes = _recomputing(plan, tool, recompute)
        whole_blocks = tool in _SPLITS_BLOCKS and len(plan.input_shape) == 1
        if own_name == "tensor" and not whole_blocks:
            split = sum(c.tensor.degree > 1 for c in plan.components)
            notes.append(
                f"{tool} splits linear layers only: convolutions and attention in the {split} components that "
                "the plan splits stay whole"
            )
        return Choice(own_name, (*notes, *left_out(plan, own_name, tool)))
    usable = [name for name in able if name not in _UNCLEAR]
    fitting = [b for b in plan.baselines if b.name in usable and b.fits and b.step_time_s is not None]
    best = min(fitting, key=lambda b: b.step_time_s or 0.0, default=None)
    if best is None or best.step_time_s is None:
        raise UsageError(
            f"{tool} cannot run this plan ({_why(plan, own_name)}), and none of the baselines it could run fits: "
            f"{', '.join(sorted(usable))}"
        )
    promised = plan.prediction.step_time_s
    loss = f"{seconds(best.step_time_s)} a step predicted, {seconds(promised)} under the plan"
    note = (
        f"{tool} cannot express {_why(plan, own_name)}: this is {best.name}, {loss} "
        f"({percent(best.step_time_s / promised - 1, signed=True)})"
    )
    return Choice(best.name, (note, *left_out(_as_baseline(plan, best), best.name, tool)), best)


def _recomputing(plan: Plan, tool: str, recompute: Literal["each", "all", "none"]) -> list[str]:
    """Sentences on recomputation that ``tool`` cannot express."""
    count = sum(c.checkpoint for c in plan.components)
    if count and recompute == "none":
        return [f"{tool} recomputes nothing by itself, the plan {count} components: expect more memory"]
    if count not in (0, len(plan.components)) and recompute == "all":
        return [f"{tool} recomputes all blocks or none: the plan recomputes {count} of them"]
    return []


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
