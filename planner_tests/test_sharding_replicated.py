"""Data parallelism as the strategies use it: what is sent before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from asa.sharding.collectives.axis import Axis
from asa.sharding.collectives.segment import summed
from asa.sharding.gradients import replicated as page


@pytest.mark.parametrize("alike", [False, True])
def test_weights_are_sent_unless_they_are_known_to_be_equal(monkeypatch: pytest.MonkeyPatch, alike: bool) -> None:
    sent: list[int] = []
    group: Any = dist.ProcessGroup(0, 2)
    monkeypatch.setattr(page.direct, "broadcast", lambda flat, **_: sent.append(flat.nbytes))
    page.replicated(nn.Linear(2, 2), Axis(size=2, index=0, group=group, alike=alike))
    assert sent == ([] if alike else [4 * 6])


def test_a_sum_of_negative_zeros_is_one_however_many_there_are() -> None:
    for ranks in (2, 3, 5):
        found = torch.empty(4)
        summed(torch.full((ranks, 4), -0.0), found)
        assert found.signbit().all()
        summed(torch.arange(ranks * 4.0).view(ranks, 4), found)
        assert torch.equal(found, torch.arange(ranks * 4.0).view(ranks, 4).sum(0))
