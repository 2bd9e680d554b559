"""A law of the iteration time of a transformer under tensor, data and pipeline parallelism, fitted to measured ones.

With b samples a microbatch, m microbatches, s tokens, hidden size h, a heads, l layers a stage, degrees t, d and p, the
time of one layer and microbatch, forward and backward, is

    max(C, k D) + max(2 C, (1 - k) D) + x 4 R(2 b s h, t)                                    (layer)

* C = F / (e peak) (1 + g/(b s)) (1 + n t/h) + moved bytes / bandwidth: matrix products, forward
  F = 24 b s h^2 (1 + s/6h) / t FLOPs, less efficient with few tokens and narrow shards; elementwise kernels on b s h
  and b s h / t values and on the b a s^2 / t attention scores. Backward is twice that.
* D: the host dispatches a layer in D seconds whatever its size, a share k of it forward; ranks of a tensor-parallel
  group need a little more. Whichever is slower, device or host, decides, in each direction.
* R: the measured table of all-reduces; inside a step they run x times as long as alone.

The head after the last stage has its own two efficiencies (whole or split vocabulary) and floor. A pipeline then
takes ``p stage + head + (m - 1) (stage + head)`` and its transfers; the iteration adds the exposed part of the
gradients' all-reduce, the optimizer's passes over parameters and state, and a constant.

Every parameter has a guess from counting or data sheets and a spread around it; a fit leaves the guess where the rows
say nothing. On top, as in a profile, a layer has a table: a factor per (hidden size, microbatch, tensor degree), and
one that layers share whose tensors have equal shapes on a rank (b h values a token that are whole, h / t columns of
what is split: the same kernels and messages). Factors shrink to 1 where rows are few and are 1 where there is none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from asa.cost.traffic.collectives import Links
from asa.ir.cluster import Cluster
from asa.ir.traffic import Collective, CollectiveOp
from benchmarks.truth.downsets import Floats, Indices
from benchmarks.truth.fit import least_squares
from benchmarks.truth.vtrain import Iterations, Mask

_HALF = 2  # bytes of an activation or a gradient
_VOCABULARY = 50_257  # GPT-2's tokens; the models' only shape that the table does not state

NOISE = 0.015
"""Relative: how far two measurements of one iteration lie apart."""

CELL, SHARED = 0.05, 0.10
"""Spread of a layer's factor of its own, and of that of all layers with the same shapes on a rank.

Chosen, like the key of the second, on the rows of up to 4 GPUs: with each (hidden size, microbatch, tensor degree) in
turn left out of the fit its layer is missed by 7.2 % (root mean square), without factors by 9.8 %, and by 9.6 % where
layers of equal microbatch and tensor degree share one.
"""

_SHARP = 20.0  # exponent of the maximum of device and host: nearly hard, yet it has a slope


@dataclass(frozen=True)
class Parameter:
    """``guess`` with a relative ``spread`` (log-normal; of a share between 0 and 1, logistic-normal)."""

    guess: float
    spread: float
    meaning: str
    share: bool = False

    def value(self, x: float) -> float:
        """At x spreads from the guess."""
        if self.share:
            return 1 / (1 + math.exp(-(math.log(self.guess / (1 - self.guess)) + self.spread * x)))
        return self.guess * math.exp(self.spread * x)


PARAMETERS: Mapping[str, Parameter] = {
    "efficiency": Parameter(0.7, 0.5, "of dense peak, of large matrix products", share=True),
    "few_tokens": Parameter(64, 0.5, "tokens at which a product takes twice its time"),
    "narrow_shards": Parameter(32, 0.5, "columns of a shard at which a product takes twice its time"),
    "bandwidth": Parameter(0.8, 0.5, "of memory bandwidth, of elementwise kernels", share=True),
    "whole_bytes": Parameter(80, 0.7, "moved per token and hidden value that every rank has: norms, residuals"),
    "split_bytes": Parameter(100, 0.5, "moved per token and hidden value that is split: activations of both products"),
    "score_bytes": Parameter(110, 0.5, "moved per attention score: separate scale, mask, softmax and dropout kernels"),
    "dispatch_s": Parameter(3e-3, 1.7, "of the host, per layer and microbatch"),
    "forward": Parameter(0.5, 0.5, "share of it in forward", share=True),
    "tensor_dispatch_s": Parameter(2e-4, 0.5, "more of it with tensor parallelism"),
    "stretch": Parameter(1.3, 0.7, "a collective inside a step over the same alone"),
    "head_whole": Parameter(0.5, 0.5, "of dense peak, logits over the whole vocabulary", share=True),
    "head_split": Parameter(0.5, 0.5, "of dense peak, logits over a shard of it", share=True),
    "head_bytes": Parameter(24, 0.5, "moved per logit"),
    "head_s": Parameter(2e-3, 0.5, "dispatch of the head, per microbatch"),
    "transfer_s": Parameter(1e-4, 0.5, "latency of a transfer between stages"),
    "exposed": Parameter(0.8, 0.5, "of the gradients' all-reduce"),
    "update_bytes": Parameter(30, 0.25, "moved per parameter: fp32 weight, two moments, half-precision copies"),
    "constant_s": Parameter(3e-3, 0.5, "per iteration"),
}


class Law:
    """The law for the rows of a table, on a cluster whose tables price the collectives."""

    def __init__(self, table: Iterations, cluster: Cluster, *, cells: bool = True) -> None:
        self.table, self.cells = table, cells
        t, b, s, h, a = table.tensor, table.micro_batch, table.sequence_length, table.hidden_size, table.attention_heads
        self._peak, self._memory = cluster.device.peak_bf16_flops, cluster.device.memory_bandwidth
        links = Links(cluster)
        self._products = 24 * b * s * h**2 * (1 + s / (6 * h)) / t
        self._scores = b * a * s**2 / t
        self._layer_parameters, vocabulary = 12 * h**2 / t, _VOCABULARY * h / t
        self._stage_layers = table.layers / table.pipeline
        self._parameters = self._layer_parameters * self._stage_layers + vocabulary
        self._reduced = _priced(links, "all_reduce", _HALF * b * s * h, t, np.ones_like(t))
        self._synchronised = _priced(links, "all_reduce", _HALF * self._parameters, table.data, t)
        self._sent = _priced(links, "send_recv", _HALF * b * s * h, np.full_like(t, 2), np.ones_like(t))
        self._cell, self._cells = _numbered(h, b, t)
        self._kind, self._kinds = _numbered(b * h, h / t)

    def fit(self, rows: Mask) -> Floats:
        """Parameters, in spreads from their guesses, that explain ``rows`` best."""
        count = len(PARAMETERS) + (self._cells + self._kinds if self.cells else 0)
        # Without a table of its own a layer is off by as much as the table would have said.
        noise = NOISE if self.cells else math.hypot(NOISE, CELL, SHARED)
        measured = np.log(self.table.seconds)
        return least_squares(lambda x: (np.log(self.seconds(x)) - measured)[rows], np.zeros(count), prior=noise)

    def named(self, x: Floats) -> dict[str, float]:
        """The parameters of a fit by name, in their units."""
        return {name: p.value(float(at)) for (name, p), at in zip(PARAMETERS.items(), x, strict=False)}

    def seconds(self, x: Floats) -> Floats:
        """Predicted seconds of every row's iteration."""
        v, table = self.named(x), self.table
        m, p = table.microbatches, table.pipeline
        stage = self._stage_layers * self._layer(v) * self._factors(x)
        head = self._head(v)
        transfer = np.where(p > 1, 2 * (self._sent + v["transfer_s"]), 0.0)
        pipeline = p * stage + head + (m - 1) * (stage + head) + (m + p - 2) * transfer
        update = v["update_bytes"] * self._parameters / self._memory
        found: Floats = pipeline + v["exposed"] * self._synchronised + update + v["constant_s"]
        return found

    def _layer(self, v: Mapping[str, float]) -> Floats:
        table = self.table
        tokens, t, h = table.micro_batch * table.sequence_length, table.tensor, table.hidden_size
        product = self._products / (v["efficiency"] * self._peak)
        product = product * (1 + v["few_tokens"] / tokens) * (1 + v["narrow_shards"] * t / h)
        moved = tokens * h * (v["whole_bytes"] + v["split_bytes"] / t) + self._scores * v["score_bytes"]
        device = product + moved / (v["bandwidth"] * self._memory) / 3  # bytes are counted over both directions
        host: Floats = v["dispatch_s"] + v["tensor_dispatch_s"] * (t > 1).astype(np.float64)
        forward = _larger(device, v["forward"] * host)
        backward = _larger(2 * device, (1 - v["forward"]) * host)
        return forward + backward + v["stretch"] * 4 * self._reduced

    def _head(self, v: Mapping[str, float]) -> Floats:
        table = self.table
        logits = table.micro_batch * table.sequence_length * _VOCABULARY / table.tensor
        efficiency = np.where(table.tensor == 1, v["head_whole"], v["head_split"])
        device = 6 * logits * table.hidden_size / (efficiency * self._peak)
        device = device + logits * v["head_bytes"] / (v["bandwidth"] * self._memory)
        return _larger(device, np.full(len(table), v["head_s"]))

    def _factors(self, x: Floats) -> Floats:
        if not self.cells:
            return np.ones(len(self.table))
        own, shared = np.split(x[len(PARAMETERS) :], [self._cells])
        found: Floats = np.exp(CELL * own[self._cell] + SHARED * shared[self._kind])
        return found


def _larger(a: Floats, b: Floats) -> Floats:
    top = np.maximum(a, b)
    return top * ((a / top) ** _SHARP + (b / top) ** _SHARP) ** (1 / _SHARP)


def _priced(links: Links, op: CollectiveOp, size: Floats, ranks: Floats, stride: Floats) -> Floats:
    return np.asarray([
        links.seconds(Collective(op=op, phase="forward", bytes=float(b), ranks=int(n), stride=int(k)))
        for b, n, k in zip(size, ranks, stride, strict=True)
    ])  # fmt: skip


def _numbered(*columns: Floats) -> tuple[Indices, int]:
    """Per row the number of its combination of values, and how many combinations there are."""
    unique, number = np.unique(np.stack(columns), axis=1, return_inverse=True)
    return number.ravel().astype(np.int64), unique.shape[1]
