"""What there is to choose: the request, the space, its candidates and their prices."""
