"""Implementations of the consistency disciplines, one per file. Each takes the place of a worker's optimizer step."""

from __future__ import annotations

from torch.optim import Optimizer

from asa.errors import UsageError
from asa.executor.consistency.conduct import Conduct, check_plan
from asa.executor.consistency.diloco import OuterSteps
from asa.executor.consistency.federated import FederatedAverage
from asa.executor.consistency.hogwild import SharedWeights
from asa.executor.consistency.local_sgd import LocalSteps
from asa.executor.consistency.parameter_servers import Served
from asa.executor.consistency.pipedream import UndrainedPipeline
from asa.executor.consistency.quorum import QuorumSteps
from asa.executor.consistency.star import StarVotes
from asa.executor.model.parallel import ParallelModel
from asa.executor.model.votes import Votes
from asa.ir.consistency import Discipline


def conduct_of(model: ParallelModel, optimizer: Optimizer, votes: Votes) -> Conduct | None:
    """Implementation of the discipline in the plan of ``model``, begun; None if the plan has none (collective).

    Raises:
        UsageError: the discipline cannot run, or not under this plan.
    """
    discipline = model.whole_plan.consistency
    if discipline is None:
        return None
    check_plan(model)
    conduct = _made(discipline, model, optimizer, votes)
    conduct.begin()
    return conduct


def _made(discipline: Discipline, model: ParallelModel, optimizer: Optimizer, votes: Votes) -> Conduct:
    if discipline.served:
        return Served(discipline, model, optimizer, votes)
    if discipline.name == "hogwild":
        if not isinstance(votes, StarVotes):
            raise UsageError("hogwild's ranks never take a step together; `asa train` and `asa.Job` run it")
        return SharedWeights(discipline, model, optimizer, votes)
    if discipline.quorum is not None:
        if not isinstance(votes, StarVotes):
            raise UsageError(f"{discipline}: a quorum needs workers that may be lost: `asa train` and `asa.Job` run it")
        return QuorumSteps(discipline, model, optimizer, votes)
    made = {"local_sgd": LocalSteps, "diloco": OuterSteps, "fedavg": FederatedAverage, "pipedream": UndrainedPipeline}
    return made[discipline.name](discipline, model, optimizer)
