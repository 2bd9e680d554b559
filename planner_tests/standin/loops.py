"""Training loops of one's own, alone and under a launcher."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from planner_tests.standin.registry import apart, scenario


@scenario
def trains_a_loop_of_ones_own(folder: Path) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    failed = apart(lambda _: _own_loop(device="cuda"), folder)
    assert "no CUDA device is usable here; choose device='cpu'" in str(failed), failed
    del os.environ["CUDA_VISIBLE_DEVICES"]
    (folder / "error").unlink()
    _own_loop(device="cuda")


@scenario
def refuses_a_rank_without_a_device(folder: Path) -> None:
    """The second rank of a launcher that starts more of them than there are devices."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "0", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    failed = apart(lambda _: _own_loop(device="cuda"), folder)
    assert "local rank 1 needs a CUDA device of its own, this machine has 1" in str(failed), failed
    (folder / "error").unlink()


@scenario
def trains_a_loop_of_ones_own_under_a_launcher(folder: Path) -> None:
    """Each strategy on two GPUs gives the weights of a plain loop on a core."""
    _launched(2, _own_loops)


@scenario
def trains_a_model_of_several_inputs_under_a_launcher(folder: Path) -> None:
    """What cannot be cut runs whole, and is measured as such."""
    _launched(2, _two_inputs)


@scenario
def trains_a_job(folder: Path) -> None:
    """A training that is handed over: an epoch on two GPUs, its state saved and read back."""
    _launched(2, _job)


def _launched(ranks: int, function: Callable[[], None]) -> None:
    """``function`` on each of ``ranks`` processes that know each other as torchrun's do."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.environ |= {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                    "TORCHELASTIC_RUN_ID": "standin",
                }  # fmt: skip
                function()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * ranks


def _own() -> tuple[Any, Any, Any]:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(4, (64,)))
    loader = torch.utils.data.DataLoader(data, batch_size=16)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), loader


def _epoch(model: Any, optimizer: Any, loader: Any) -> dict[str, Any]:
    import torch

    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {name: value.cpu() for name, value in model.state_dict().items()}


def _own_loop(**options: Any) -> dict[str, Any]:
    import asa

    model, optimizer, loader = asa.parallelize(*_own(), **options)
    assert next(iter(loader))[0].device.type == "cuda"
    state = _epoch(model, optimizer, loader)
    model.close()
    return state


def _own_loops() -> None:
    import torch

    alone = _epoch(*_own())
    for strategy in ("ddp", "zero1", "fsdp", "tensor"):
        state = _own_loop(strategies=(strategy,), time_limit_s=5)
        for name, value in alone.items():
            torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-4, msg=f"{strategy}: {name}")
    _own_loop(time_limit_s=5, cache=None)  # links are measured


def _two_inputs() -> None:
    import torch

    import asa

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)

        def forward(self, x: Any, z: Any) -> Any:
            return self.a(x) * self.b(z)

    def trained(model: Any, optimizer: Any, loader: Any) -> Any:
        for x, z, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x, z), y).backward()
            optimizer.step()
        return {name: value.cpu() for name, value in model.state_dict().items()}

    def made() -> tuple[Any, Any, Any]:
        model = Two()
        data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randn(32, 8), torch.randn(32, 4))
        loader = torch.utils.data.DataLoader(data, batch_size=8)
        return model, torch.optim.SGD(model.parameters(), lr=0.1), loader

    alone = trained(*made())
    for options in ({}, {"strategies": ("fsdp",)}, {"strategies": ("ddp",)}):
        model, optimizer, loader = made()
        if options.get("strategies") == ("ddp",):  # the user has moved it already
            model.to(f"cuda:{os.environ['LOCAL_RANK']}")
        placed = asa.parallelize(model, optimizer, loader, time_limit_s=5, **options)
        for name, value in trained(*placed).items():
            torch.testing.assert_close(value, alone[name], rtol=1e-3, atol=1e-4)
        placed[0].close()


def _job() -> None:
    import torch

    import asa

    alone = _epoch(*_own())
    for strategies in (("ddp",), ("gpipe",)):
        folder = Path(strategies[0])
        job = asa.Job(
            *_own(), torch.nn.functional.cross_entropy, out=folder, strategies=strategies, time_limit_s=5, max_norm=1.0
        )
        job.run(epochs=1)
        for name, value in job.state_dict().items():
            torch.testing.assert_close(value.cpu(), alone[name], rtol=1e-3, atol=1e-4, msg=f"{strategies}: {name}")
        job.close()
