"""``asa.parallelize``: a model, an optimizer and a loader spread over the ranks, for a loop that stays as it is."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from asa.api.batches import GlobalBatches
from asa.api.names import StateNames
from asa.api.notes import differing, trained_norms
from asa.api.optimizers import Rebinding, check_shared, others_over, planned_as, whole_because
from asa.api.optimizers import elementwise as known_elementwise
from asa.api.place import find_place, same_weights
from asa.api.placed import PlacedLoader, PlacedModel, rows_here
from asa.api.planned import Wishes, agreed_plan, checked_plan, usual_cache
from asa.api.planning import check_plain, device_of, one_tensor, shaped
from asa.errors import UsageError
from asa.executor.materialize import materialize
from asa.ir.cluster import Cluster
from asa.ir.layout import Layout
from asa.ir.plan import Plan
from asa.ir.profile import Precision
from asa.launch import give_back_freed_memory, launched
from asa.strategies import offered


def parallelize(
    model: nn.Module,
    optimizer: Optimizer,
    loader: Any,
    *,
    plan: Plan | Path | str = "auto",
    example_input: Tensor | None = None,
    cluster: Cluster | Path | str | None = None,
    strategies: tuple[str, ...] | None = None,
    pins: tuple[str, ...] = (),
    memory_bytes: int | None = None,
    precision: Precision = "fp32",
    batch_norm: Literal["local", "exact"] = "local",
    device: str = "auto",
    elementwise: bool | None = None,
    seed: int = 0,
    time_limit_s: float = 60.0,
    cache: Path | str | None = "auto",
    timeout_s: float = 300.0,
) -> tuple[PlacedModel, Optimizer, PlacedLoader]:
    """``model``, ``optimizer`` and ``loader`` on the ranks that are there; every rank calls this.

    Ranks are those of ``torchrun`` (or another launcher), or of a process group formed before; alone, nothing is spread
    and nothing measured. Rank 0 profiles the model and plans once (kept for the next time under ``cache``); its weights
    are everybody's. The loop stays::

        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()

    and does what it does on one device with the loader's batch: ``loader`` yields this rank's samples of every batch,
    and a mean loss over them counts by how many they are. So a loss must be a *mean over the batch*, and what it says
    is this rank's mean. Every sample goes to one rank; of a last batch with fewer samples than ranks some go to
    several, and count once. BatchNorm normalises over a rank's samples, as in data parallelism
    (``batch_norm="exact"``: over all); its running statistics are averaged whenever the loader is through.

    A loop can have one stage only: plans are without pipelines and without accumulation. For those, :class:`asa.Job`.

    Args:
        model: of one tensor input, batch first.
        optimizer: any; it goes on with the same groups, hyperparameters and state. One that does not update element by
            element (not of ``torch.optim``) keeps its parameters whole.
        loader: of global batches, as for one device. The samples of a ``DataLoader`` over an indexed dataset are loaded
            on the rank that needs them, in the order rank 0 draws; anything else that yields batches is read by all.
        plan: a plan for so many ranks, or its file.
        example_input: a batch the model takes; by default the first tensor of the loader's.
        cluster, strategies, pins, memory_bytes, precision: as for :func:`asa.plan`.
        device: ``auto``, ``cpu`` or ``cuda``.
        elementwise: whether ``optimizer`` updates element by element, where it is none of ``torch.optim``: only then
            may ranks hold parts of parameters.
        time_limit_s: for profiling.
        cache: a folder of plans; None keeps nothing.
        timeout_s: how long a rank waits for the others, in seconds; the first time no longer than 60.

    Raises:
        UsageError: a plan for other ranks or with stages, a loader or an optimizer that cannot be used.
        InfeasibleError: no plan fits.
    """
    check_plain(model)
    place = find_place(device, timeout_s)
    batches = GlobalBatches(loader, place.votes, lambda total: rows_here(total, place.ranks, place.rank))
    optimizers = [optimizer, *others_over(model, optimizer)]
    rebindings = [Rebinding(o, model, elementwise=known_elementwise(o, elementwise)) for o in optimizers]
    if place.ranks == 1 and plan == "auto":
        model.to(place.device)
        if not launched():
            warnings.warn(
                "1 process: nothing is spread; start several with torchrun --nproc-per-node N SCRIPT", stacklevel=2
            )
        alone = PlacedModel(None, place, plain=model)
        return alone, optimizer, PlacedLoader(batches, alone)
    shaped(model)
    for each in optimizers:
        check_shared(each)
    example = example_of(batches) if example_input is None else one_tensor(example_input)
    same_weights(place, model)
    if plan == "auto":
        whole = next(filter(None, (whole_because(o, model, elementwise) for o in optimizers)), "")
        wishes = Wishes(
            global_batch=batches.batch_size, optimizer=planned_as(optimizer), pipelines=False, strategies=strategies,
            pins=pins, memory_bytes=memory_bytes, cluster=cluster, precision=precision, time_limit_s=time_limit_s,
            cache=cache_folder(cache), whole_because=whole,
        )  # fmt: skip
        chosen, _ = agreed_plan(place, model, example, wishes)
    else:
        chosen = checked_plan(place, plan)
    if len(chosen.stages) > 1 or chosen.num_microbatches > 1:
        raise UsageError(
            f"the plan has {len(chosen.stages)} stages and {chosen.num_microbatches} microbatches: a loop of one's own "
            "runs one of each; use asa.Job, or plan without pipelines"
        )
    names, norms = StateNames(model), trained_norms(model)
    parallel = materialize(
        chosen, model, example.to(device_of(model)), rank=place.rank, strategies=offered(), device=place.device,
        seed=seed, batch_norm=batch_norm, timeout_s=timeout_s, keyed_draws=True,
        outer=Layout(width=place.ranks, data=place.ranks, tensor=1),
    )  # fmt: skip
    parallel.meet = place.votes.meet
    for line in differing(chosen, norms, parallel.changed, batch_norm) if place.rank == 0 else ():
        warnings.warn(line, stacklevel=2)
    placed = PlacedModel(parallel, place, names=names)
    placed.begin(model.training)
    for rebinding in rebindings:
        rebinding.apply(parallel, placed.seen)
    give_back_freed_memory()  # the model was traced and cut up
    return placed, optimizer, PlacedLoader(batches, placed)


def cache_folder(cache: Path | str | None) -> Path | None:
    """The folder that is meant."""
    return usual_cache() if cache == "auto" else None if cache is None else Path(cache)


def example_of(batches: GlobalBatches) -> Tensor:
    """Two samples of what the model reads: the first tensor of the loader's batches.

    Raises:
        UsageError: batches that are no tensor, tuple or list.
    """
    batch = batches.example()
    if isinstance(batch, tuple | list) and batch:
        batch = batch[0]
    if not isinstance(batch, Tensor):
        raise UsageError(f"the loader yields {type(batch).__name__}; say what the model reads with example_input")
    return batch if len(batch) > 1 else batch.repeat(2, *(1,) * (batch.dim() - 1))
