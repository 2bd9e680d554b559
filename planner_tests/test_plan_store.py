"""A stored plan is used for the very request that it was made for, and for nothing else."""

from __future__ import annotations

import io
import warnings
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import asa
from asa.api.plans.planned import _kept
from asa.ir import codec
from asa.ir.cluster import Cluster
from asa.launch import run_ranks

LINKS = "profiles/cluster.local-gloo-2.json"


def _measured(folder: Path, links: Path, *, width: int = 8, batch: int = 6, **options: Any) -> bool:
    """Whether a call measured the model, in place of using a stored plan."""
    net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))
    loader = DataLoader(TensorDataset(torch.zeros(24, 8), torch.zeros(24).long()), batch)
    text = io.StringIO()
    with redirect_stderr(text), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net, _, _ = asa.parallelize(  # type: ignore[assignment]
            net, torch.optim.SGD(net.parameters(), 0.1), loader, cluster=str(links), cache=folder, time_limit_s=0.3,
            **options,
        )  # fmt: skip
        net.close()  # type: ignore[operator]
    return "measuring the model" in text.getvalue()


def _walk(rank: int, folder: Path, links: Path) -> dict[str, bool]:
    def changed(how: Any) -> None:
        torch.distributed.barrier()
        if rank == 0:
            how()
        torch.distributed.barrier()

    def renamed() -> None:
        codec.save(replace(codec.load(Cluster, links), name="others"), links)

    def cut() -> None:
        for file in folder.glob("*.plan.json"):
            file.write_bytes(file.read_bytes()[:300])

    def exchanged() -> None:
        files = sorted(folder.glob("*.plan.json"))
        texts = [file.read_text() for file in files]
        for file, text in zip(files, texts[1:] + texts[:1], strict=True):
            file.write_text(text)

    found = {"first": _measured(folder, links), "again": _measured(folder, links)}
    found["other batch"] = _measured(folder, links, batch=12)
    found["other model"] = _measured(folder, links, width=12)
    changed(exchanged)
    found["plans exchanged"] = _measured(folder, links)
    changed(cut)
    found["cut"] = _measured(folder, links)
    changed(renamed)
    found["other links"] = _measured(folder, links)
    found["at last"] = _measured(folder, links)
    return found


def test_a_stored_plan_is_for_one_request(tmp_path: Path) -> None:
    links = tmp_path / "links.json"
    links.write_text(Path(LINKS).read_text())
    found = run_ranks(2, _walk, tmp_path / "plans", links, threads=1, timeout_s=120)[0]
    assert found == {name: name not in ("again", "at last") for name in found}


def test_whether_a_plan_is_kept_is_said(tmp_path: Path) -> None:
    assert _kept(tmp_path / "later" / "plans") == "the plan is kept for the next time"
    assert _kept(None) == "nothing is kept for the next time"
    assert "/dev/null cannot be written: name another folder" in _kept(Path("/dev/null/asa/plans"))
