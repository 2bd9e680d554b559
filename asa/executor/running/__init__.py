"""A complete run: training loop, ranks, recovery, output folder, export."""
