"""Connections between ranks: what is sent arrives, and processes may end while others still hold one."""

from __future__ import annotations

import os
import threading
from datetime import timedelta

import pytest
import torch
from started import rank_of, together
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo

from asa.executor.consistency.channels import Channel, head

PROGRAM = """
import sys, time
import torch
import torch.distributed as dist
from asa.executor.consistency.channels import Exchange, head

dist.init_process_group("gloo")
rank = dist.get_rank()
exchange = Exchange(rank, [0, 1], [0])
if rank == 0:
    exchange.serve(lambda worker, asked, body: (asked, body), lambda worker: None)
exchange.connect()
if rank == 1:
    for _ in range(2):  # afterwards a body like this one is waited for
        exchange.ask([(head(5.0), torch.ones(500))])
dist.barrier()
if str(rank) == sys.argv[1]:
    time.sleep(1.5)
elif sys.argv[2] == "closes":
    exchange.close()
"""


@pytest.mark.parametrize(("stays", "closes"), [(0, ""), (1, ""), (None, ""), (1, "closes")])
def test_a_process_ends_without_an_abort_while_others_are_connected(stays, closes, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    env = {**os.environ, **together(2)}
    ranks = [rank_of(program, rank, str(stays), closes, env=env) for rank in range(2)]
    codes = [rank.wait() for rank in ranks]
    assert codes == [0, 0], [rank.err.read_text() for rank in ranks]


def test_bodies_of_any_size_arrive_whole_and_in_order():
    store = HashStore()
    sizes = [None, 0, 3, 400, 400, 300, 400, 1 << 21, 400, None, 300, 1 << 21, 400]
    bodies = [None if n is None else torch.arange(n, dtype=torch.float32) + i for i, n in enumerate(sizes)]
    bodies[6] = bodies[6].double()

    def answer() -> None:
        channel = Channel(ProcessGroupGloo(store, 1, 2, timeout=timedelta(seconds=120)), 0)
        for _ in bodies:
            channel.send(*channel.receive())

    thread = threading.Thread(target=answer)
    thread.start()
    channel = Channel(ProcessGroupGloo(store, 0, 2, timeout=timedelta(seconds=120)), 1)
    for i, body in enumerate(bodies):
        channel.expect()
        channel.send(head(i), body)
        header, found = channel.receive()
        assert header[0] == i
        assert (found is None) == (body is None)
        assert body is None or (found.dtype == body.dtype and torch.equal(found, body))
    thread.join()
