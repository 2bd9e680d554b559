"""The limit of memory that is reached first is found wherever it was set: on a group of control, or one around it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from asa.instruments import memory_limits
from asa.ir import control_groups

MIB = 1 << 20


def _tree(at: Path, version: int, groups: dict[str, tuple[int | None, int, int]]) -> None:
    """Folders of groups with (limit or None, bytes of its processes, bytes that they share)."""
    root = at / "memory" if version == 1 else at
    for name, (limit, own, shared) in groups.items():
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        if version == 1:
            (folder / "memory.limit_in_bytes").write_text(str((1 << 63) - 4096 if limit is None else limit))
            (folder / "memory.stat").write_text(f"rss 1\ntotal_rss {own}\ntotal_shmem {shared}\ntotal_cache 999\n")
        else:
            (folder / "memory.max").write_text("max" if limit is None else str(limit))
            (folder / "memory.stat").write_text(f"anon {own}\nfile 999\nshmem {shared}\n")


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("limited", ["job/rank", "job", ""])
def test_the_fullest_group_around_a_process_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, limited: str
) -> None:
    own = tmp_path / "cgroup"
    own.write_text("12:cpu,cpuacct:/\n11:memory:/job/rank\n" if version == 1 else "0::/job/rank\n")
    groups = dict.fromkeys(("", "job", "job/rank"), (None, 90 * MIB, 8 * MIB))
    _tree(tmp_path / "groups", version, groups | {limited: (100 * MIB, 90 * MIB, 8 * MIB)})
    monkeypatch.setattr(control_groups, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(control_groups, "OWN_GROUPS", own)
    found = {r.kind: r for r in memory_limits.limits_of(torch.device("cpu"))}
    assert found["group"].full == pytest.approx(0.98), "what processes share cannot be given back, either"
    _tree(tmp_path / "groups", version, {limited: (None, 90 * MIB, 8 * MIB)})
    assert "group" not in {r.kind for r in memory_limits.limits_of(torch.device("cpu"))}
