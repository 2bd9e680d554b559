"""Profiles and clusters as they are meant, where nobody measured them: presets, estimates, what-ifs."""
