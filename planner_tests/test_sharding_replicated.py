"""Data parallelism as the strategies use it: what is sent before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from asa.sharding import replicated as page
from asa.sharding.axis import Axis


@pytest.mark.parametrize("alike", [False, True])
def test_weights_are_sent_unless_they_are_known_to_be_equal(monkeypatch: pytest.MonkeyPatch, alike: bool) -> None:
    sent: list[int] = []
    group: Any = dist.ProcessGroup(0, 2)
    monkeypatch.setattr(page.direct, "broadcast", lambda flat, **_: sent.append(flat.numel()))
    page.replicated(nn.Linear(2, 2), Axis(size=2, index=0, group=group, alike=alike))
    assert sent == ([] if alike else [6])
