"""Observation of a run: time spans, timelines, memory, warm-up."""
