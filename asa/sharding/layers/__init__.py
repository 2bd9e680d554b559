"""Components of a model: how they split over ranks, their shards, and what they recompute."""
