"""Comparisons: benchmark, emulation, rehearsal, equivalence with one device."""
