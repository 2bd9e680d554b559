"""Pages that need no network: of a benchmark, a plan, a run and a study."""
