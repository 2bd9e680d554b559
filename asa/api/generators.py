"""State of a program's default random generators (torch, Python, numpy) on every rank."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from asa.executor.model.votes import Votes
from asa.tracing.preserve import foreign_state


def generators_now() -> tuple[Any, ...]:
    """State of the generators of this process; unchanged if nothing was drawn."""
    return (torch.get_rng_state().numpy().tobytes(), *foreign_state())


def take_torch_generator(votes: Votes) -> None:
    """Set torch's generator on every rank to the state of that of rank 0 (collective)."""
    state = torch.get_rng_state()
    votes.broadcast(state)
    torch.set_rng_state(state)


def as_on_rank_0(votes: Votes) -> None:
    """Set the generators of every rank to the state of those of rank 0 (collective)."""
    if votes.num_ranks == 1:
        return
    take_torch_generator(votes)
    numpy = sys.modules.get("numpy")
    states: list[Any] = [random.getstate()]
    if numpy is not None:
        kind, words, *more = numpy.random.get_state()
        states.append([kind, words.tolist(), *more])
    version, words, gauss = (received := votes.tell(states))[0]
    random.setstate((version, tuple(words), gauss))
    if numpy is not None and len(received) > 1:
        numpy.random.set_state(tuple(received[1]))
