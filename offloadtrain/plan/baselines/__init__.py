"""Models of other systems from their papers, for comparison with the plan.

`published.json` and `peer_cells.json` have the figures that papers and projects report, with their
sources; `job_errors.json` has the errors of plans of offloadtrain's own jobs.
Start at `published.py`, then `peers.py`.
"""
