"""Other systems, as their papers describe them: what the plan is held against."""
