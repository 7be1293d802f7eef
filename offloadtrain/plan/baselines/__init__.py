"""Models of other systems from their papers, for comparison with the plan.

`published.json` and `peer_cells.json` have what papers and projects say of themselves, and where;
`job_errors.json` has how far plans of our own jobs were off.
Start at `published.py`, then `peers.py`.
"""
