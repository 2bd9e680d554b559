"""Processes that end while others still hold a connection to them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys, time
import torch.distributed as dist
from asa.executor.consistency.channels import Exchange, head

dist.init_process_group("gloo")
rank = dist.get_rank()
exchange = Exchange(rank, [0, 1], [0])
if rank == 0:
    exchange.serve(lambda worker, asked, body: (asked, body), lambda worker: None)
exchange.connect()
if rank == 1:
    exchange.ask([(head(5.0), None)])
dist.barrier()
if str(rank) == sys.argv[1]:
    time.sleep(3)
elif sys.argv[2] == "closes":
    exchange.close()
"""


@pytest.mark.parametrize(("stays", "closes"), [(0, ""), (1, ""), (None, ""), (1, "closes")])
def test_a_process_ends_without_an_abort_while_others_are_connected(stays, closes):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    around = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(stays), closes], stderr=subprocess.PIPE, text=True,
            env={**around, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
