"""Loops of frameworks around what ``asa.parallelize`` returns, where they are installed: accelerate, Lightning, ignite,
skorch, the trainer of transformers. Ranks see the variables of ``torchrun``, as in a script."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.program_table import Made, normal, program, sgd
from benchmarks.program_table.common import CE, classified

KIND = "framework"


@contextlib.contextmanager
def _launched() -> Iterator[None]:
    """Context with the variables that a launcher sets."""
    before = dict(os.environ)
    if dist.is_initialized():
        rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29531", TORCHELASTIC_RUN_ID="none", GROUP_RANK="0")
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.filterwarnings("ignore", module=r"(lightning|accelerate|skorch|ignite|transformers)")
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def add(name: str, loop: Callable[[Any, Any, Any], Any], make: Callable[[], Made] = classified) -> None:
    def launched(net: Any, opt: Any, batches: Any) -> Any:
        with _launched():
            return loop(net, opt, batches)

    program(KIND, name, make, launched)


def _ignite() -> None:
    from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.handlers import EarlyStopping
    from ignite.metrics import Accuracy, Loss, RunningAverage

    def supervised(net: Any, opt: Any, batches: Any) -> None:
        create_supervised_trainer(net, opt, CE).run(batches, max_epochs=2)

    add("ignite: a supervised trainer", supervised)

    def with_metrics(net: Any, opt: Any, batches: Any) -> None:
        def step(_engine: Any, batch: Any) -> float:
            net.train()
            opt.zero_grad()
            loss = CE(net(batch[0]), batch[1])
            loss.backward()
            opt.step()
            return float(loss.item())

        trainer = Engine(step)
        RunningAverage(output_transform=lambda out: out).attach(trainer, "loss")
        evaluator = create_supervised_evaluator(net, metrics={"accuracy": Accuracy(), "loss": Loss(CE)})
        stopper = EarlyStopping(1, lambda engine: -engine.state.metrics["loss"], trainer)
        evaluator.add_event_handler(Events.COMPLETED, stopper)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(batches))
        trainer.run(batches, max_epochs=4)

    add("ignite: metrics and early stopping over the loader", with_metrics, lambda: classified(lr=0.5))


def _accelerate() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    def fresh(**options: Any) -> Any:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        return Accelerator(cpu=True, **options)

    def prepared(net: Any, opt: Any, batches: Any) -> None:
        accelerator = fresh()
        net, opt, batches = accelerator.prepare(net, opt, batches)
        for _ in range(2):
            for x, y in batches:
                opt.zero_grad()
                accelerator.backward(CE(net(x), y))
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
                opt.step()

    add("accelerate: all prepared", prepared)

    def backward_only(net: Any, opt: Any, batches: Any) -> None:
        accelerator = fresh(gradient_accumulation_steps=2)
        for _ in range(2):
            for i, (x, y) in enumerate(batches):
                accelerator.backward(CE(net(x), y))
                if i % 2 == 1:
                    accelerator.clip_grad_norm_(net.parameters(), 1.0)
                    opt.step()
                    opt.zero_grad()

    add("accelerate: its backward and clipping", backward_only)

    def optimizer_only(net: Any, opt: Any, batches: Any) -> None:
        accelerator = fresh()
        opt = accelerator.prepare(opt)
        schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(opt, 2, 0.5))
        for x, y in (*batches, *batches):
            accelerator.backward(CE(net(x), y))
            opt.step()
            schedule.step()
            opt.zero_grad()

    add("accelerate: optimizer and schedule prepared", optimizer_only)


def _lightning() -> None:
    import lightning
    from lightning.fabric import Fabric

    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)

    def fabric(net: Any, opt: Any, batches: Any) -> None:
        fabric = Fabric(accelerator="cpu", devices=1)
        net, opt = fabric.setup(net, opt)
        batches = fabric.setup_dataloaders(batches)
        for _ in range(2):
            for x, y in batches:
                opt.zero_grad()
                fabric.backward(CE(net(x), y))
                fabric.clip_gradients(net, opt, max_norm=1.0)
                opt.step()

    add("lightning: Fabric, all set up", fabric)

    def fabric_backward(net: Any, opt: Any, batches: Any) -> None:
        fabric = Fabric(accelerator="cpu", devices=1)
        for x, y in (*batches, *batches):
            opt.zero_grad()
            fabric.backward(CE(net(x), y))
            opt.step()

    add("lightning: Fabric's backward", fabric_backward)

    class Lit(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self, net: Any, opt: Any) -> None:
            super().__init__()
            self.net, self.opt = net, opt

        def training_step(self, batch: Any, _i: int) -> Tensor:
            loss = CE(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return self.opt

    def trainer(**options: Any) -> Any:
        return lightning.Trainer(
            accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, **options,
        )  # fmt: skip

    def fitted(net: Any, opt: Any, batches: Any) -> None:
        trainer().fit(Lit(net, opt), batches)

    add("lightning: Trainer.fit", fitted)

    def fitted_clipped(net: Any, opt: Any, batches: Any) -> None:
        trainer(gradient_clip_val=0.5, accumulate_grad_batches=2).fit(Lit(net, opt), batches)

    add("lightning: Trainer.fit, accumulated and clipped", fitted_clipped, lambda: classified(count=24))


def _skorch() -> None:
    from skorch import NeuralNet

    def fitted(net: Any, opt: Any, batches: Any) -> None:
        learner = NeuralNet(
            net, criterion=nn.CrossEntropyLoss, optimizer=lambda *_args, **_options: opt, max_epochs=2, verbose=0,
            train_split=None, iterator_train=lambda *_args, **_options: batches,
        )  # fmt: skip
        learner.fit(batches.dataset, y=None)

    add("skorch: NeuralNet.fit with the loader", fitted)

    def own_loader(net: Any, opt: Any, batches: Any) -> None:
        learner = NeuralNet(
            net, criterion=nn.CrossEntropyLoss, optimizer=lambda *_args, **_options: opt, max_epochs=2, verbose=0,
            train_split=None, batch_size=6,
        )  # fmt: skip
        learner.fit(batches.dataset, y=None)

    add("skorch: NeuralNet.fit with a loader of its own", own_loader)


class Answering(nn.Module):
    """A model that returns its loss, as a trainer of transformers wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.relu(self.first(x)))
        return {"loss": CE(logits, labels), "logits": logits}


def _answering() -> Made:
    net = Answering().double()
    x, y = normal(24, 8), torch.randint(3, (24,))
    rows: Any = [{"x": x[i], "labels": y[i]} for i in range(24)]
    return net, sgd(net), DataLoader(rows, 6)


def _transformers() -> None:
    from transformers import Trainer, TrainingArguments

    def arguments() -> Any:
        return TrainingArguments(
            output_dir=tempfile.mkdtemp(), num_train_epochs=2, per_device_train_batch_size=6, use_cpu=True,
            save_strategy="no", report_to=[], disable_tqdm=True, max_grad_norm=1.0, logging_steps=100,
        )  # fmt: skip

    def trained(net: Any, opt: Any, batches: Any) -> None:
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda _step: 1.0)

        class Given(Trainer):  # type: ignore[misc]
            def get_train_dataloader(self) -> Any:
                return batches

        Given(model=net, args=arguments(), train_dataset=batches.dataset, optimizers=(opt, schedule)).train()

    add("transformers: Trainer with the loader", trained, _answering)

    def trained_own(net: Any, opt: Any, batches: Any) -> None:
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda _step: 1.0)
        Trainer(model=net, args=arguments(), train_dataset=batches.dataset, optimizers=(opt, schedule)).train()

    add("transformers: Trainer with a loader of its own", trained_own, _answering)


for _name, _add in (
    ("ignite", _ignite), ("accelerate", _accelerate), ("lightning", _lightning), ("skorch", _skorch),
    ("transformers", _transformers),
):  # fmt: skip
    if importlib.util.find_spec(_name):
        _add()
