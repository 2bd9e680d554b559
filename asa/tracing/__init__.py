"""Traces any model into a chain of components that computes bitwise what the model computes."""

from asa.tracing.build import trace
from asa.tracing.called import UNCUT, CalledModel, called
from asa.tracing.chain import TracedModel
from asa.tracing.component import TracedComponent
from asa.tracing.preserve import histories
from asa.tracing.whole import outcome

__all__ = [
    "UNCUT",
    "CalledModel",
    "TracedComponent",
    "TracedModel",
    "called",
    "histories",
    "outcome",
    "trace",
]
