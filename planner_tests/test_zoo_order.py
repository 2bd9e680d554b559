"""The global order: every epoch a permutation, cut into steps that do not depend on who computes them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asa.errors import UsageError
from asa.ir.layout import bounds
from asa.zoo.data import GlobalOrder, draws

sizes = st.integers(1, 300)


@settings(max_examples=60)
@given(samples=sizes, batch=sizes, seed=st.integers(-(2**63), 2**63 - 1), epoch=st.integers(0, 10**6))
def test_an_epoch_is_each_sample_once(samples: int, batch: int, seed: int, epoch: int) -> None:
    order = GlobalOrder(samples, batch, seed)
    batches = [order.batch(epoch, step) for step in range(order.steps_per_epoch)]
    assert all(len(b) == batch for b in batches[:-1])
    assert 1 <= len(batches[-1]) <= batch
    assert sorted(torch.cat(batches).tolist()) == list(range(samples))


@settings(max_examples=40)
@given(samples=sizes, batch=sizes, ranks=st.integers(1, 9))
def test_ranks_share_a_step_without_loss_or_repetition(samples: int, batch: int, ranks: int) -> None:
    whole = GlobalOrder(samples, batch, seed=5)
    for step in range(whole.steps_per_epoch):
        parts = []
        for rank in range(ranks):
            mine = GlobalOrder(samples, batch, seed=5).batch(0, step)
            parts.append(mine[slice(*bounds(len(mine), ranks, rank))])
        assert torch.equal(torch.cat(parts), whole.batch(0, step))


@settings(max_examples=40)
@given(samples=sizes, before=sizes, after=sizes, epoch=st.integers(0, 5), data=st.data())
def test_a_resumed_job_sees_every_sample_once_whatever_the_batch(
    samples: int, before: int, after: int, epoch: int, data: st.DataObject
) -> None:
    old, new = GlobalOrder(samples, before, seed=1), GlobalOrder(samples, after, seed=1)
    stop = data.draw(st.integers(0, old.steps_per_epoch))
    seen = [old.batch(epoch, s) for s in range(stop)]
    position = old.position(epoch, stop)
    while position < (epoch + 1) * samples:
        seen.append(new.at(position))
        position += len(seen[-1])
    assert position == (epoch + 1) * samples
    assert sorted(torch.cat(seen).tolist()) == list(range(samples))


def test_positions_count_global_samples() -> None:
    order = GlobalOrder(10, 4, seed=0)
    assert [order.position(0, s) for s in range(4)] == [0, 4, 8, 10]
    assert order.position(2, 1) == 24
    assert order.locate(24) == (2, 4)
    assert torch.equal(order.at(24), order.batch(2, 1))
    for bad in (-1, 3):
        with pytest.raises(ValueError, match="steps"):
            order.batch(0, bad)
    with pytest.raises(ValueError, match="step 4"):
        order.position(0, 4)


def test_epochs_and_seeds_differ_and_repeat() -> None:
    def first(seed: int, epoch: int) -> list[int]:
        return GlobalOrder(1000, 1000, seed).batch(epoch, 0).tolist()

    assert first(0, 0) == first(0, 0)
    assert len({tuple(first(s, e)) for s in range(3) for e in range(3)}) == 9
    # Neighbours in the order are no neighbours in the data.
    steps = torch.tensor(first(0, 0)).diff().abs().double()
    assert 280 < steps.mean() < 390


def test_a_caller_cannot_spoil_the_order() -> None:
    order = GlobalOrder(100, 100, seed=0)
    before = order.batch(0, 0)
    order.batch(0, 0).fill_(0)
    assert torch.equal(order.batch(0, 0), before)


def test_a_shorter_last_batch_may_be_left_out() -> None:
    even = GlobalOrder(10, 4, seed=0, drop_last=True)
    assert even.steps_per_epoch == 2
    assert len(set(torch.cat([even.batch(0, 0), even.batch(0, 1)]).tolist())) == 8
    assert even.position(1, 0) == 8
    with pytest.raises(UsageError, match="larger than the data set of 10 images; try --global-batch 10"):
        GlobalOrder(10, 11, seed=0, drop_last=True)
    with pytest.raises(UsageError):
        GlobalOrder(10, 0, seed=0)


def test_draws_are_splitmix64() -> None:
    # First outputs of the reference implementation (Vigna, prng.di.unimi.it/splitmix64.c) seeded with 1234567.
    reference = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    found = draws.words(1234567, torch.arange(1, 5)).tolist()
    assert [w % 2**64 for w in found] == reference


@settings(max_examples=50)
@given(low=st.integers(-50, 50), width=st.integers(1, 100), field=st.integers(0, 3))
def test_integers_cover_their_range_evenly(low: int, width: int, field: int) -> None:
    random = draws.words(draws.key(width, field), torch.arange(200 * width))
    found = draws.integers(random, low, low + width, field=field)
    counts = torch.bincount(found - low, minlength=width)
    assert len(counts) == width
    assert counts.min() > 100
    assert counts.max() < 300


def test_keys_tell_order_and_sign_apart() -> None:
    keys = [draws.key(1, 2), draws.key(2, 1), draws.key(1), draws.key(-1), draws.key(1, 0), draws.key(0, 1)]
    assert len(set(keys)) == len(keys)
