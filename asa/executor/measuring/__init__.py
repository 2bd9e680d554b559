"""Measurements of plans: benchmark, emulated devices, rehearsal of one rank, numerical equivalence with one device."""
