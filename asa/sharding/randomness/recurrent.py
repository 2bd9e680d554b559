"""Recurrent layers with dropout that is a function of the sample.

``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` apply dropout between layers inside one call, from the rank's generator. Here, in
training, their layers run one after the other instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from asa.sharding.randomness.samples import SampleDropout, named
from asa.sharding.stock import stock

_KERNELS: dict[str, Any] = {
    "LSTM": torch.lstm, "GRU": torch.gru, "RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu,
}  # fmt: skip
"""Kernels by the module's ``mode``. Each computes one layer with the module's weights."""


def drops_between_layers(module: nn.Module) -> bool:
    """Whether ``module`` is a recurrent layer of torch's own with dropout inside."""
    if not isinstance(module, nn.RNNBase) or module.mode not in _KERNELS or not stock(module):
        return False
    return module.dropout > 0 and module.num_layers > 1


def with_layers_by_sample(module: nn.RNNBase, dropout: SampleDropout, site: str) -> None:
    """Make ``module`` use ``dropout`` between its layers in training from now on. Every call of it is a site of its
    own. In evaluation, and on a sequence without a batch, it does what the stock module does."""
    module.__dict__["forward"] = BySample(module, dropout, site)


class BySample:
    """Replaces the module's ``forward``. Elements of a mask are numbered by (time, feature) within their sample."""

    def __init__(self, module: nn.RNNBase, dropout: SampleDropout, site: str) -> None:
        self._module, self._dropout, self._site = module, dropout, site

    def __call__(self, input: Any, hx: Any = None) -> tuple[Any, Any]:
        """Output and last states, like the stock module."""
        m = self._module
        packed = isinstance(input, PackedSequence)
        if not m.training or (not packed and input.dim() != 3):
            return type(m).forward(m, input, hx)  # type: ignore[no-any-return]
        x, sizes, order, back = input if packed else (input, None, None, None)
        num_samples = x.shape[0 if m.batch_first else 1] if sizes is None else int(sizes[0])
        states = self._zeros(x, num_samples) if hx is None else tuple(hx) if m.mode == "LSTM" else (hx,)
        if order is not None and hx is not None:
            states = tuple(s.index_select(1, order) for s in states)
        check: Any = m.check_forward_args  # torch's own checks; an LSTM's takes both states
        check(x, states if m.mode == "LSTM" else states[0], sizes)
        y, ends = self._layers(x, sizes, order, states)
        if back is not None:
            ends = tuple(s.index_select(1, back) for s in ends)
        return PackedSequence(y, sizes, order, back) if packed else y, ends if m.mode == "LSTM" else ends[0]

    def _zeros(self, x: Tensor, num_samples: int) -> tuple[Tensor, ...]:
        m = self._module
        lines = m.num_layers * (1 + m.bidirectional)
        widths = (m.proj_size or m.hidden_size, m.hidden_size)[: 1 + (m.mode == "LSTM")]
        return tuple(x.new_zeros(lines, num_samples, width) for width in widths)

    def _layers(
        self, x: Tensor, sizes: Tensor | None, order: Tensor | None, states: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """(output, states): output of the last layer, and last states of all layers, each [layers x directions,
        samples, width]."""
        m, directions = self._module, 1 + self._module.bidirectional
        kernel, weights, ends = _KERNELS[m.mode], m.all_weights, []
        call = self._dropout.context.call(self._site)
        for layer in range(m.num_layers):
            of_layer = slice(layer * directions, (layer + 1) * directions)
            if layer:
                self._dropout.site = named(f"{self._site}.{layer}#{call}")
                x = self._dropped(x, sizes, order)
            start = [s[of_layer].contiguous() for s in states]
            sequence = (x,) if sizes is None else (x, sizes)
            options = (m.bias, 1, 0.0, True, bool(m.bidirectional), *[m.batch_first] * (sizes is None))
            flat = [w for direction in weights[of_layer] for w in direction]
            x, *last = kernel(*sequence, start if m.mode == "LSTM" else start[0], flat, *options)
            ends.append(last)
        return x, tuple(torch.cat(parts) for parts in zip(*ends, strict=True))

    def _dropped(self, x: Tensor, sizes: Tensor | None, order: Tensor | None) -> Tensor:
        if sizes is None:
            return self._dropout(x) if self._module.batch_first else self._dropout(x.transpose(0, 1)).transpose(0, 1)
        # Packed rows come time by time, of samples in the order of their lengths.
        mask = self._dropout(x.new_ones(int(sizes[0]), len(sizes), x.shape[1]))
        sizes = sizes.to(x.device)
        times = torch.repeat_interleave(torch.arange(len(sizes), device=x.device), sizes)
        rows = torch.arange(len(x), device=x.device) - (sizes.cumsum(0) - sizes)[times]
        return x * mask[rows if order is None else order[rows], times]
