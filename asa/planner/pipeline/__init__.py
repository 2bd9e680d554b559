"""The search over stages: cuts, widths, microbatches and schedules, with a bound on every plan."""
