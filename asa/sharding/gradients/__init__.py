"""Gradients over data-parallel ranks: averaged whole or in shards, compressed, and updates that ranks divide."""
