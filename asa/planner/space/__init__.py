"""What there is to choose: the request, the space it opens, points of it and what they cost."""
