"""Profiles and clusters that were not measured: presets, estimates and what-if variants."""
