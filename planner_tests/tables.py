"""Tables of cases of one kind: every run of the tests takes some of them, and ``make tables`` takes all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def some(members: Iterable[Any], tested: Collection[Any]) -> list[Any]:
    """Parameters of a test: the ``members`` of a table. Those that are not in ``tested`` run with ``make tables``."""
    every = list(members)
    assert tested, "of every table something is tested"
    assert [m for m in tested if m not in every] == [], "in the table"
    return [m if m in tested else pytest.param(*_several(m), marks=pytest.mark.table) for m in every]


def _several(member: Any) -> tuple[Any, ...]:
    return member if isinstance(member, tuple) else (member,)
