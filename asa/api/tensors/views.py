"""A program's view of the tensors that ranks hold: split ones look whole, others are unchanged."""

from __future__ import annotations

from torch import Tensor

from asa.executor.model.parallel import ParallelModel
from asa.executor.model.state import LocalTensor
from asa.sharding.collectives.axis import Axis
from asa.sharding.layers.modules import ParameterShard, shards_of
from asa.sharding.split import Split, TensorPart


class TensorViews:
    """Keeps one permanent object for every tensor of a model, which a program can hold on to."""

    def __init__(self, model: ParallelModel) -> None:
        self._device = model.device
        self._views: dict[int, TensorPart] = {}
        axes = zip(model.components, model.tensor_axes, strict=True)
        self.splits = [{name: self._split(s, axis) for name, s in shards_of(c).items()} for c, axis in axes]
        """Splits of each component's tensors, by name."""

    def _split(self, shard: ParameterShard, axis: Axis) -> Split | None:
        return None if axis.size == 1 else Split(axis, shard, self._device)

    def of(self, tensor: Tensor, split: Split | None) -> Tensor:
        """The object for ``tensor``, of which this rank has a part if it is split."""
        if split is None:
            return tensor
        view = self._views.get(id(tensor))
        if view is None:
            view = self._views[id(tensor)] = TensorPart(tensor, split)
        return view

    def item(self, item: LocalTensor) -> Tensor:
        """The tensor that a program sees for an entry of the executor's list."""
        return self.of(item.tensor, None if item.shard is None else self._split(item.shard, item.axis))
