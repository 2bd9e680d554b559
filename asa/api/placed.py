"""What ``asa.parallelize`` returns: a rank's part of a model and its share of a loader, used as the originals were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from asa.api.batches import GlobalBatches, Share, moved
from asa.api.clipping import clip, understood_by_torch
from asa.api.names import StateNames
from asa.api.numbers import numbers_of_wholes
from asa.api.outputs import Demands, entering, leaving
from asa.api.place import Place
from asa.api.seen import Seen
from asa.errors import UsageError
from asa.executor.parallel import ParallelModel
from asa.executor.parameter_hooks import refuse_hooks, replaced
from asa.executor.state import load_full_state
from asa.ir.layout import bounds
from asa.ir.plan import Plan

MEETING_S = 30.0
"""For ranks to come to what a program easily calls on one of them only."""


def rows_here(total: int, ranks: int, rank: int) -> list[int]:
    """Rows of a batch of ``total`` that a rank computes: its share, or where there are too few for all, one of them."""
    if total < ranks:
        return [rank % total] if total else []
    return list(range(*bounds(total, ranks, rank)))


class PlacedModel(nn.Module):
    """One rank's part of a model, called as the model was: ``model(x)`` with this rank's samples gives their outputs.

    Collective unless every rank computes for itself: what one rank calls, all must. ``plan``: what it runs under.
    """

    parallel: ParallelModel | None
    place: Place
    share: Share | None
    """The batch the loader yielded last."""
    calls: int
    names: StateNames | None
    demands: Demands | None
    seen: Seen | None

    def __init__(
        self,
        parallel: ParallelModel | None,
        place: Place,
        *,
        plain: nn.Module | None = None,
        names: StateNames | None = None,
    ) -> None:
        super().__init__()
        demands, seen = (None, None) if parallel is None else (Demands(parallel), Seen(parallel))
        self.__dict__.update(
            parallel=parallel, place=place, share=None, calls=0, names=names, demands=demands, seen=seen
        )  # fmt: skip
        self.plan: Plan | None = None if parallel is None else parallel.plan
        self.parts = nn.ModuleList(parallel.components if parallel is not None else [] if plain is None else [plain])
        self._independent = True
        self._averages = False
        if parallel is not None:
            understood_by_torch(parallel)
            numbers_of_wholes(parallel.parameters())
            refuse_hooks(parallel.parameters())
            self._independent = all(layout.data == place.ranks for layout in parallel.layouts)
            self._averages = self._independent and not any(map(replaced, parallel.plan.components))

    def forward(self, x: Any, *more: Any, **options: Any) -> Any:
        """The model's own output for this rank's samples ``x`` [N, ...]; alone, for whatever it takes.

        Raises:
            UsageError: on several ranks, anything but one tensor.
        """
        parallel = self.parallel
        x = moved(x, self.place.device)
        if parallel is None:
            return self.parts[0](x, *moved(more, self.place.device), **moved(options, self.place.device))
        if more or options or not isinstance(x, Tensor):
            raise UsageError(
                "on several ranks a model is called with one tensor; fix its other arguments before "
                "asa.parallelize, in a module around it"
            )
        total, weight, first = self._total(len(x))
        if self._averages and torch.is_grad_enabled():
            few = self.share is not None and self.share.total < self.place.ranks
            counted = self.share.total if self.share is not None and few else total
            weight = parallel.reduction.weighed(weight, counted, self.place.ranks)
        value, sides = parallel.compute(entering(x, weight), torch.arange(first, first + total), self.calls)
        if self.training:
            self.__dict__["calls"] += 1

        assert self.demands is not None
        demands = self.demands

        def weighed(tensor: Tensor) -> Tensor:
            return leaving(tensor, weight, demands)

        return parallel.traced.assemble(weighed(value), {name: weighed(side) for name, side in sides.items()})

    def _total(self, rows: int) -> tuple[int, float, int]:
        """Rows that all ranks compute now, the weight of this rank's mean loss, and the number of the first row.

        Known from the loader for what it yielded; of other samples, each rank says how many it has.
        """
        share = self.share
        ranks, rank = self.place.ranks, self.place.rank
        if share is not None and self.training and len(share.rows) == rows:
            if share.total < ranks:  # some compute a sample that is another's, and does not count
                return ranks, ranks / share.total if rank < share.total else 0.0, share.first
            return share.total, rows * ranks / share.total, share.first
        if self._independent and not self.training:
            return rows * ranks, 1.0, 0
        found = [int(each[0]) for each in self.place.votes.gather([float(rows)])]
        total = sum(found)
        wanted = [stop - start for start, stop in (bounds(total, ranks, r) for r in range(ranks))]
        if found != wanted and not self._independent:
            raise UsageError(
                f"ranks compute on {found} samples at once, this plan shares {total} as {wanted}: use the loader that "
                "asa.parallelize returned, or give every rank as many"
            )
        return total, rows * ranks / max(total, 1), 0

    def begin(self, mode: bool) -> None:
        """Be in training or in evaluation, every module as it came."""
        self.__dict__["training"] = mode
        if self.parallel is not None:
            self.parallel.train(mode)

    def train(self, mode: bool = True) -> PlacedModel:
        """As of any module."""
        parallel = self.parallel
        if parallel is None:
            super().train(mode)
            return self
        self.__dict__["training"] = mode
        parallel.train(mode, all_alike=True)
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """What this rank holds, under the names of the model; of what the plan splits, a view of the whole."""
        return self._named("named_parameters", prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """As :meth:`named_parameters`."""
        return self._named("named_buffers", prefix, recurse, remove_duplicate)

    def _named(self, kind: str, prefix: str, recurse: bool, remove_duplicate: bool) -> Iterator[tuple[str, Any]]:
        found: set[int] = set()
        for i, part in enumerate(self.parts):
            for name, tensor in getattr(part, kind)("", recurse, remove_duplicate):
                if remove_duplicate and id(tensor) in found:
                    continue
                found.add(id(tensor))
                seen = self.seen
                yield (
                    f"{prefix}.{name}" if prefix else name,
                    (tensor if seen is None else seen.of(tensor, seen.splits[i].get(name))),
                )

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """Full tensors under the model's own names, on the CPU: what the plain model loads. Collective where the plan
        splits or shards anything, so call it on every rank."""
        parallel = self.parallel
        if parallel is None:
            return self.parts[0].state_dict(*args, **options)
        assert self.names is not None
        if any(map(replaced, parallel.plan.components)):
            parallel.meet("model.state_dict() of a plan that splits the model", within_s=MEETING_S)
        return self.names.full(parallel)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Full tensors, as :meth:`state_dict` or the plain model gives them; every rank is given all.

        Raises:
            UsageError: a name is missing.
        """
        parallel = self.parallel
        if parallel is None:
            return self.parts[0].load_state_dict(state_dict, strict=strict, assign=assign)
        try:
            load_full_state(parallel, dict(state_dict))
        except KeyError as error:
            raise UsageError(f"the state lacks {error.args[0]}") from None
        return None

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """As ``torch.nn.utils.clip_grad_norm_``, over all ranks and shards (collective)."""
        parallel = self.parallel
        if parallel is None:
            return nn.utils.clip_grad_norm_(self.parts[0].parameters(), max_norm)
        return clip(parallel, max_norm)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.parallel is None:
            return super().__reduce_ex__(protocol)
        raise UsageError(
            "a model that ranks share cannot be copied or pickled as a whole: save model.state_dict(), and average "
            "weights in copies of model.parameters()"
        )

    def epoch_ended(self) -> None:
        """Running statistics become those of all ranks; the loader calls this when it is through (collective)."""
        parallel = self.parallel
        if parallel is not None and self.training:
            parallel.average_buffers()

    def close(self) -> None:
        """Leave the plan's process groups (collective)."""
        parallel = self.parallel
        if parallel is not None:
            parallel.close()


class PlacedLoader:
    """This rank's samples of every global batch, on its device. Attributes not found here are the loader's own."""

    def __init__(self, batches: GlobalBatches, model: PlacedModel) -> None:
        self._batches, self._model = batches, model

    def __iter__(self) -> Iterator[Any]:
        device = self._model.place.device
        try:
            for share in self._batches.epoch():
                self._model.__dict__["share"] = share
                yield moved(share.batch, device)
            self._model.epoch_ended()
        finally:
            self._model.__dict__["share"] = None

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._batches.loader, name)
