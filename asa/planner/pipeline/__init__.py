"""The search over pipelines: cuts, widths, microbatches and schedules, with a bound on every plan."""
