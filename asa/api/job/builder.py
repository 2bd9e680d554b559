"""This rank's part of a job's model under a plan, and under the plans that follow it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from asa.api.messages import say
from asa.api.model.notes import differences, drawing, drawing_by_share
from asa.api.rank_context import RankContext
from asa.api.tensors.retired import retire_in_job
from asa.errors import UsageError
from asa.executor.model.materialize import materialize
from asa.executor.model.parallel import ParallelModel
from asa.executor.model.template import TracedTemplate
from asa.executor.training.settings import TrainSettings
from asa.ir.plan import Plan
from asa.strategies import offered
from asa.tracing import TracedModel


class Builder:
    """Builds a model under a plan: from the model itself the first time, later from a template, whose weights are
    loaded afterwards.

    ``subject``: function from the model to what is materialized. ``sample``: an example of its input. ``norms`` and
    ``writes``: its trained normalization layers, and what its forward changes. ``replans``: whether a template is kept.
    ``late``: whether this rank takes the place of a lost one.
    """

    def __init__(
        self, model: nn.Module, subject: Callable[[nn.Module], nn.Module | TracedModel], sample: Tensor,
        context: RankContext, settings: TrainSettings, *, norms: Sequence[str], writes: Sequence[str], replans: bool,
        late: bool,
    ) -> None:  # fmt: skip
        self._model, self._subject, self._sample, self._context = model, subject, sample, context
        self._settings, self._norms, self._writes, self._replans, self._late = settings, norms, writes, replans, late
        self._first = True
        self._template: TracedTemplate | None = None

    def __call__(self, plan: Plan, processes: tuple[int, ...]) -> ParallelModel:
        """The model under ``plan``, whose ranks are ``processes`` (collective).

        Raises:
            UsageError: it cannot be built again.
        """
        first, self._first = self._first, False
        source: nn.Module | TracedModel | TracedTemplate | None = (
            self._subject(self._model) if first else self._template
        )
        if source is None:
            raise UsageError(
                "the model cannot be copied (copy.deepcopy fails)"
                if self._replans
                else "this job was made without re-planning"
            )
        context, settings = self._context, self._settings
        built = materialize(
            plan, source, self._sample, rank=context.rank, strategies=offered(), device=context.device,
            seed=settings.seed, batch_norm=settings.batch_norm, timeout_s=settings.timeout_s, processes=processes,
            keyed_draws=True, keep_template=self._replans, runs_discipline=True, isolated=self._late,
        )  # fmt: skip
        built.meet = context.votes.meet
        retire_in_job(self._model, built.components)
        self._template = built.template
        lines = differences(plan, built, self._norms, self._writes, settings.batch_norm)
        for line in lines if context.rank == 0 else ():
            warnings.warn(line, stacklevel=4)
        if first and (names := next(filter(None, context.votes.exchange(drawing(built))), "")):
            say(context, f"{names} draws random numbers by sample and step: the same under every plan, and others than "
                "without asa")  # fmt: skip
        if first and (line := next(filter(None, context.votes.exchange(drawing_by_share(built))), "")):
            say(context, line)
        return built
