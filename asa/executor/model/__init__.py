"""Builds one rank's modules from a plan: places, wraps and connects components, reduces gradients, runs a step."""
