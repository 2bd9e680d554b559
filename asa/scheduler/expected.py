"""Expected times of the current plan, by rank and by transfer, from the run's original files."""

from __future__ import annotations

from asa.cost.ranks import Ranks
from asa.cost.traffic.collectives import Links, carried
from asa.errors import InvalidInputError
from asa.interfaces.strategy import Strategies
from asa.ir.cluster import Cluster
from asa.ir.measurements import Transfer
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.ir.traffic import CollectiveOp
from asa.planner import verify
from asa.scheduler.shape import Message


class Expected:
    """Expected seconds of a step, of each rank's computation, and of transfers, under one plan and one set of costs.

    Raises:
        InvalidInputError: the plan is of another model than the profile.
    """

    def __init__(self, plan: Plan, profile: Profile, cluster: Cluster, strategies: Strategies) -> None:
        self.step_s = verify(plan, profile, cluster, strategies).step_time_s
        ranks = Ranks(plan, profile, cluster, strategies)
        self.own_s = ranks.compute()
        # A measured transfer has its links, but not its ranks; their stride comes from the plan.
        collectives = ranks.carried()
        self._strides = {(c.level, c.ranks): c.stride for c in collectives if c.op != "send_recv"}
        self.levels = frozenset(c.level for c in collectives)
        self._cluster = cluster
        width = max(len(s.ranks) for s in plan.stages)
        self._links = Links(cluster, width, width if len(plan.stages) == 1 else plan.gpus)
        self._idle_links = Links(cluster)

    def message(self, transfer: Transfer) -> Message | None:
        """``transfer`` with its expected seconds; None if the tables do not contain it, or nothing is sent."""
        expected_s = self._transfer_s(transfer)
        if not expected_s:
            return None
        op: CollectiveOp = "send_recv" if transfer.op == "send" else transfer.op  # type: ignore[assignment]
        return Message(
            carried_bytes=carried(op, transfer.group_size) * transfer.num_bytes, expected_s=expected_s,
            seconds=transfer.seconds, n=transfer.n,
        )  # fmt: skip

    def _transfer_s(self, transfer: Transfer) -> float | None:
        level = transfer.level
        if not 0 <= level < len(self._cluster.levels) or not transfer.num_bytes > 0:
            return None
        border = 1 if level == 0 else self._cluster.levels[level - 1].devices
        if transfer.op in ("send", "send_recv"):
            return self._idle_links.handover(transfer.num_bytes, border, 1)
        stride = self._strides.get((level, transfer.group_size))
        links = self._idle_links if stride is None else self._links
        if stride is None:  # not a transfer of the plan, but a probe of all ranks or of neighbours
            stride = 1 if transfer.group_size > border else border
        try:
            return links.time(transfer.op, transfer.num_bytes, transfer.group_size, stride)  # type: ignore[arg-type]
        except InvalidInputError:
            return None
