"""Models that are divided among ranks: pipelines, parts of matrices, experts, copies of the state.

It uses the engine through `engine.division`; the engine does not know how a model is divided.
`norm.py` adds the norms of all parts, `checks.py` refuses unsupported divisions, and
`unused_experts.py` leaves experts without tokens out of updates.
Start at `mesh.py`, the axes of the ranks; then `pipeline/`, `tensor/` and `expert_parallel.py`.
"""
