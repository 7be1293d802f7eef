"""Models of other systems from their papers, for comparison with the plan."""
