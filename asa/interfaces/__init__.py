"""Abstract base classes of strategies, schedules and executors. Declarations only, no torch."""
