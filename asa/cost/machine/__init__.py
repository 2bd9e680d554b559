"""Profiles and clusters that nobody measured: presets, estimates and what-if variants."""
