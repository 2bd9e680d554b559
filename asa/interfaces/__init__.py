"""What the wings have in common: abstract strategies, schedules and executors. Declarations only, no torch."""
