"""Costs of boundaries between components of different layouts."""
