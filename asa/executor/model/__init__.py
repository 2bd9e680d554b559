"""A plan becomes modules: components placed, wrapped and reduced; one step of the schedule."""
