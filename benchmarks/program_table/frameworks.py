"""Loops and losses of other packages around the placed model, where these are installed."""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.program_table import Made, epochs, made, normal, pairs, program
from benchmarks.program_table.scripts import numbers

CE = F.cross_entropy


def _net(out: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, out))


def _classes(net: Any = _net, count: int = 21, batch: int = 6, **options: Any) -> Made:
    return made(net(), normal(count, 8), torch.randint(3, (count,)), batch=batch, **options)


def _ignite() -> None:
    from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.handlers import EarlyStopping, EMAHandler, TerminateOnNan
    from ignite.metrics import Accuracy, Loss, RunningAverage

    def trained(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
        """A trainer, an evaluator behind every epoch, early stopping."""
        trainer = create_supervised_trainer(net, opt, CE)
        judge = create_supervised_evaluator(net, {"accuracy": Accuracy(), "loss": Loss(CE)})
        trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
        judge.add_event_handler(Events.COMPLETED, EarlyStopping(1, lambda e: -e.state.metrics["loss"], trainer))
        seen = []

        @trainer.on(Events.EPOCH_COMPLETED)
        def _(_: Any) -> None:
            judge.run(batches)
            seen.append(judge.state.metrics["loss"])

        trainer.run(batches, max_epochs=3)
        return numbers(loss=seen)

    def stepped(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
        """A process function, a running average, a schedule by events."""

        def update(_: Any, batch: Any) -> float:
            net.train()
            opt.zero_grad()
            loss = CE(net(batch[0]), batch[1])
            loss.backward()
            opt.step()
            return loss.item()

        trainer = Engine(update)
        RunningAverage(output_transform=lambda v: v).attach(trainer, "loss")
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=2), lambda _: schedule.step())
        trainer.run(batches, max_epochs=2)
        return {}

    def averaged(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
        trainer = create_supervised_trainer(net, opt, CE)
        handler = EMAHandler(net, momentum=0.1)
        handler.attach(trainer)
        trainer.run(batches, max_epochs=2)
        return {f"ema.{k}": v for k, v in handler.ema_model.state_dict().items()}

    program("framework", "ignite: trainer and evaluator", _classes, trained)
    program("framework", "ignite: process function", _classes, stepped)
    program("framework", "ignite: averaged", _classes, averaged)


def _torchmetrics() -> None:
    import torchmetrics

    def metered(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
        """Metrics that know of ranks by themselves."""
        accuracy, mean = torchmetrics.Accuracy("multiclass", num_classes=3), torchmetrics.MeanMetric()
        found = []
        for _ in range(2):
            for x, y in batches:
                opt.zero_grad()
                out = net(x)
                loss = CE(out, y)
                loss.backward()
                opt.step()
                accuracy.update(out, y)
                mean.update(loss.detach(), len(y))
            found.append(accuracy.compute() + mean.compute())
            accuracy.reset()
            mean.reset()
        return numbers(found=torch.stack(found))

    def stopped(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
        """The rate falls by a metric of the training batches."""
        accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, "max", patience=0)
        for _ in range(3):
            for x, y in batches:
                opt.zero_grad()
                out = net(x)
                accuracy(out, y)
                CE(out, y).backward()
                opt.step()
            schedule.step(accuracy.compute())
            accuracy.reset()
        return {}

    program("framework", "torchmetrics", _classes, metered)
    program("framework", "torchmetrics: rate by accuracy", _classes, stopped)


def _skorch() -> None:
    import skorch

    def fitted(net: Any, _opt: Any, batches: Any) -> None:
        """The placed model in a classifier with a loop and loaders of its own."""
        x, y = batches.dataset.tensors
        clf = skorch.NeuralNetClassifier(
            net, criterion=nn.CrossEntropyLoss, optimizer=torch.optim.SGD, lr=0.05, max_epochs=2, batch_size=6,
            train_split=None, verbose=0, iterator_train__shuffle=False, classes=[0, 1, 2],
        )  # fmt: skip
        clf.fit(x, y)

    program("framework", "skorch", _classes, fitted)


def _ema() -> None:
    from ema_pytorch import EMA

    def averaged(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
        ema = EMA(net, beta=0.9, update_after_step=0, update_every=1)
        for x, y in itertools.chain(batches, batches):
            opt.zero_grad()
            CE(net(x), y).backward()
            opt.step()
            ema.update()
        return {f"ema.{k}": v for k, v in ema.ema_model.state_dict().items()}

    program("framework", "ema_pytorch", _classes, averaged)


def _optimizers() -> None:
    import torch_optimizer

    for name in ("AdaBound", "DiffGrad", "Lamb", "NovoGrad", "RAdam", "Yogi", "Shampoo", "LARS"):
        kind = getattr(torch_optimizer, name, None)
        if kind is None:
            continue

        def make(kind: Any = kind) -> Made:
            net, _, batches = _classes()
            return net, kind(net.parameters(), lr=0.01), batches

        program("framework", f"torch_optimizer: {name}", make, epochs(pairs(CE)))

    def ahead(net: Any, opt: Any, batches: Any) -> None:
        epochs(pairs(CE))(net, torch_optimizer.Lookahead(opt, k=3), batches)

    program("framework", "torch_optimizer: Lookahead", _classes, ahead)


def _metric_learning() -> None:
    from pytorch_metric_learning import losses, miners

    for name, loss in {
        "triplet": losses.TripletMarginLoss(), "contrastive": losses.ContrastiveLoss(), "NT-Xent": losses.NTXentLoss(),
        "multi-similarity": losses.MultiSimilarityLoss(), "circle": losses.CircleLoss(),
    }.items():  # fmt: skip
        program("framework", f"metric learning: {name}", lambda: _classes(lambda: _net(6), 24), epochs(pairs(loss)))
    miner, triplet = miners.BatchHardMiner(), losses.TripletMarginLoss()
    program("framework", "metric learning: mined", lambda: _classes(lambda: _net(6), 24),
            epochs(pairs(lambda o, y: triplet(o, y, miner(o, y)))))  # fmt: skip

    def memory(net: Any, opt: Any, batches: Any) -> None:
        bank = losses.CrossBatchMemory(losses.ContrastiveLoss(), 6, memory_size=12)
        epochs(pairs(bank))(net, opt, batches)

    program("framework", "metric learning: memory", lambda: _classes(lambda: _net(6), 24), memory)


for package, add in {
    "ignite": _ignite, "torchmetrics": _torchmetrics, "skorch": _skorch, "ema_pytorch": _ema,
    "torch_optimizer": _optimizers, "pytorch_metric_learning": _metric_learning,
}.items():  # fmt: skip
    if importlib.util.find_spec(package) is not None:
        add()
