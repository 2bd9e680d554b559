"""Data parallelism as the strategies use it: what is sent before the first step."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from asa.sharding import replicated as page
from asa.sharding.axis import Axis


@pytest.mark.parametrize("alike", [False, True])
def test_weights_are_sent_unless_they_are_known_to_be_equal(monkeypatch: pytest.MonkeyPatch, alike: bool) -> None:
    asked: dict[str, Any] = {}

    class Wrapper:
        def __init__(self, module: nn.Module, broadcast_buffers: bool = True, init_sync: bool = True, **_: Any) -> None:
            asked.update(broadcast_buffers=broadcast_buffers, init_sync=init_sync)

    monkeypatch.setattr(page, "DistributedDataParallel", Wrapper)
    monkeypatch.setattr(page, "compress", lambda *_: None)
    page.replicated(nn.Linear(2, 2), Axis(size=2, index=0, alike=alike))
    assert asked == {"broadcast_buffers": False, "init_sync": not alike}
