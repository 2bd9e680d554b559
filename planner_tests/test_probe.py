"""Probes of links: large messages, but short ones over slow links, so that probes can be frequent."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from asa.executor.model.votes import Votes
from asa.executor.training.probe import probe
from asa.ir.units import MIB
from asa.launch import run_ranks
from asa.sharding.collectives import direct


def _probed(rank: int) -> tuple[float, int, bool]:
    usual = direct.all_reduce

    def over_a_slow_link(x: torch.Tensor, **options: Any) -> None:
        usual(x, **options)
        time.sleep(x.nbytes / 40e6)  # so many bytes per second

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "all_reduce", over_a_slow_link)
        found = probe(Votes(120), torch.device("cpu"), compute=False)
    (message,) = found.links
    return message.num_bytes, message.n, message.seconds > 0


def test_a_slow_link_gets_short_messages_on_all_ranks() -> None:
    assert run_ranks(2, _probed, threads=1, timeout_s=60) == [(MIB / 8, 5, True)] * 2
