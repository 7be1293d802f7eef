"""Models of other systems from their papers, for comparison with the plan.

`published.json` and `peer_cells.json` have what papers and projects say of themselves, and where.
Start at `cells.py`, then `published.py` and `peers.py`.
"""
