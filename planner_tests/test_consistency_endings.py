"""Processes that end while others still hold a connection to them."""

from __future__ import annotations

import os

import pytest
from started import rank_of, together

PROGRAM = """
import sys, time
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
    codes = [rank.wait(timeout=120) for rank in ranks]
    assert codes == [0, 0], [rank.err.read_text() for rank in ranks]
