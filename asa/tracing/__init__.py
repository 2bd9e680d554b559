"""Any model to a chain of components that computes bitwise what the model computes."""

from asa.tracing.build import trace
from asa.tracing.chain import TracedModel
from asa.tracing.component import TracedComponent
from asa.tracing.facts import ComponentFacts

__all__ = ["ComponentFacts", "TracedComponent", "TracedModel", "trace"]
