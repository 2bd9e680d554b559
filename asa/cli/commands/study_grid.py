"""Definition of a study, its grid, and the blocks of cells that run together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from itertools import product
from typing import Any

from asa.cli import options as o
from asa.cli.verb import Arguments
from asa.errors import UsageError
from asa.ir.consistency import is_discipline
from asa.ir.study import Mode, Published, StudyCell, always_alone
from asa.report.units import ranks

GRID = "grid"
"""Name of the study that consists only of the given options."""

LIKE_SINGLE = ("ddp", "zero1", "zero2", "fsdp")
"""Strategies that on one device equal the single device, as in published tables."""
_MULTI_DEVICE = (
    "tensor",
    "sequence",
    "hybrid",
    "hsdp",
    "layers",
    "gpipe",
    "1f1b",
    "interleaved",
    "zero_bubble",
    "asa+replan",
)
"""Strategies that need several devices."""

PIPELINES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
"""Strategies with microbatches."""

SAMPLES = {"cifar10": 50_000, "cifar100": 50_000, "mnist": 60_000, "digits": 1437}
"""Number of training samples of official data sets, for epochs of cells in which no data is read."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Cells that differ only in strategy and epochs, so that strategies can take turns on the same ranks.

    ``input_shape`` is empty for the model's own; ``cluster`` names the devices of a predicted block; ``microbatches``:
    None for the fastest number; ``learning_rate``: None for the optimizer's usual one. ``trains_separately``:
    strategies do not take turns. Each has a training run of its own, because some of the study's cannot take turns, and
    all are to be measured in one way.
    """

    model: str
    data: str
    gpus: int
    global_batch: int
    seed: int
    strategies: tuple[str, ...]
    epochs: tuple[int, ...]
    mode: Mode
    input_shape: tuple[int, ...] = ()
    precision: str = "fp32"
    cluster: str | None = None
    microbatches: int | None = None
    learning_rate: float | None = None
    trains_separately: bool = False

    @property
    def title(self) -> str:
        """Description of its place in the grid."""
        cluster = f" of {self.cluster}" if self.cluster else ""
        seed = f", seed {self.seed}" if self.seed else ""
        return f"{self.model}, {self.data}, {ranks(self.gpus)}{cluster}, batch {self.global_batch}{seed}"

    def with_strategies(self, strategies: Sequence[str]) -> Block:
        """The block with only the given strategies."""
        return replace(self, strategies=tuple(strategies))

    def cell(
        self, strategy: str, epochs: int, *, shape: tuple[int, ...], optimizer: str, devices: str,
        classes: int | None = None, memory_bytes: int | None = None,
    ) -> StudyCell:  # fmt: skip
        """The cell of one strategy after ``epochs`` epochs. The strategy for one device has one in every block."""
        gpus, measured = 1 if strategy == "single" else self.gpus, self.mode == "measured"
        return StudyCell(
            model=self.model, data=self.data, input_shape=shape, gpus=gpus, global_batch=self.global_batch,
            strategy=strategy, epochs=epochs, seed=self.seed, precision=self.precision,  # type: ignore[arg-type]
            optimizer=optimizer, mode=self.mode, devices=devices,  # type: ignore[arg-type]
            learning_rate=self.learning_rate if measured else None,
            microbatches=self.microbatches if strategy in PIPELINES else None, classes=classes,
            memory_bytes=memory_bytes,
            alone=measured and self.trains_separately and not always_alone(strategy),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Definition:
    """A study: its name and title, its blocks, and published results for the same configurations."""

    name: str
    title: str
    blocks: tuple[Block, ...]
    published: tuple[Published, ...] = ()
    differs: tuple[str, ...] = field(default=())


def known() -> tuple[str, ...]:
    """Names of all studies, with the free grid last."""
    return (*_definitions(), GRID)


def define(args: Arguments, *, most: int, cluster_gpus: int | None) -> Definition:
    """The study that ``args`` ask for; options of the grid replace those of the definition.

    ``most``: largest number of ranks measured on this machine, 0 if none is; larger numbers are predicted, on the
    study's cluster or the one that ``--cluster`` names, with ``cluster_gpus`` devices.

    Raises:
        UsageError: a grid without a model.
    """
    definition = _definitions().get(args.study) or {}
    if not definition and not args.given("models"):
        raise UsageError("--study grid compares what the options say; name models with --models")
    defaults = {
        "models": args.models, "data": args.data, "gpus": (most or cluster_gpus,), "global_batch": (64,),
        "epochs": (1,), "seeds": (0,), "strategies": ("single", "ddp", "tensor", "hybrid", "asa"),
    }  # fmt: skip
    grid = {key: tuple(definition.get(key, default)) for key, default in defaults.items()}
    for option, key in (("models", "models"), ("data", "data"), ("gpus", "gpus"), ("global_batch", "global_batch"),
                        ("epochs", "epochs"), ("seed", "seeds"), ("strategies", "strategies")):  # fmt: skip
        if args.given(option):
            grid[key] = getattr(args, option)
    shape = o.input_shape(args) or ()
    blocks = []
    for model, data, gpus, batch, seed in product(
        grid["models"], grid["data"], sorted(grid["gpus"]), grid["global_batch"], grid["seeds"]
    ):
        mode: Mode = "measured" if gpus <= most else "predicted"
        cluster = None if mode == "measured" else args.cluster or _first_cluster(definition)
        blocks.append(
            Block(
                model=model, data=data, gpus=gpus, global_batch=batch, seed=seed, mode=mode, cluster=cluster,
                strategies=_strategies_of_block(grid["strategies"], gpus, min(grid["gpus"])),
                epochs=tuple(sorted(grid["epochs"])), input_shape=shape, precision=args.precision,
                microbatches=args.microbatches, learning_rate=args.lr,
                trains_separately=any(is_discipline(s) for s in grid["strategies"]),
            )
        )  # fmt: skip
    measured = [b for b in blocks if b.mode == "measured"]
    predicted = [b for b in blocks if b.mode == "predicted"]
    chosen = {k: set(grid[k]) for k in ("models", "gpus", "strategies") if args.given(k)}
    configurations = [p for p in definition.get("predict", ()) if args.cluster in (None, p["cluster"])]
    published_blocks = [b for p in configurations for b in _published_blocks(p, chosen)]
    is_requested = args.given("gpus") or args.given("cluster")
    predicted = [
        b for b in predicted if is_requested or (b.model, b.gpus) not in {(f.model, f.gpus) for f in published_blocks}
    ]
    return Definition(
        name=args.study,
        title=definition.get("title", "A grid"),
        blocks=(*measured, *predicted, *(b for b in published_blocks if b.gpus <= (cluster_gpus or b.gpus))),
        published=tuple(
            Published(**{**p, "value": float(p["value"])}, source=definition["source"])
            for p in definition.get("published", ())
        ),
        differs=tuple(definition.get("differs", ())),
    )


def _strategies_of_block(strategies: tuple[str, ...], gpus: int, fewest: int) -> tuple[str, ...]:
    """Strategies of a block. The strategy for one device is not repeated on more ranks if the study has a block for
    one; on one rank, strategies that split or plan again are left out."""
    if gpus == 1:
        return tuple(s for s in strategies if s in (*LIKE_SINGLE, "single", "asa") or s not in _MULTI_DEVICE) or (
            "single",
        )
    return tuple(s for s in strategies if s != "single" or fewest > 1)


def _published_blocks(p: dict[str, Any], chosen: dict[str, set[Any]]) -> list[Block]:
    """The published configurations, as blocks to predict."""
    return [
        Block(
            model=model, data=p["data"], gpus=gpus, global_batch=p["global_batch"], seed=0, mode="predicted",
            strategies=_strategies_of_block(strategies, gpus, min(p["gpus"])), epochs=(1,),
            input_shape=o.shape(p["input"]), precision=p["precision"], cluster=p["cluster"],
            microbatches=p.get("microbatches"),
        )
        for model in p["models"]
        for gpus in p["gpus"]
        if model in chosen.get("models", {model}) and gpus in chosen.get("gpus", {gpus})
        if (strategies := tuple(s for s in p["strategies"] if s in chosen.get("strategies", {s})))
    ]  # fmt: skip


def _first_cluster(definition: dict[str, Any]) -> str | None:
    """The cluster for which a study predicts more ranks than this machine has."""
    return definition.get("cluster") or next((str(p["cluster"]) for p in definition.get("predict", ())), None)


def _definitions() -> dict[str, dict[str, Any]]:
    text = files("asa").joinpath("data", "studies.json").read_text(encoding="utf-8")
    definitions: dict[str, dict[str, Any]] = json.loads(text)
    return definitions
