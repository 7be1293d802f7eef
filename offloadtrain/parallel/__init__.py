"""Models that are divided among ranks: pipelines, parts of matrices, experts, copies of the state.

It uses the engine through `engine.division`, which nothing below this package needs; the engine
knows no way to divide a model. `division.py` is the part of one process, `norm.py` adds the norms
of all, `checks.py` refuses models that are divided otherwise.
Start at `mesh.py`, the axes of the ranks; then `pipeline/`, `tensor/` and `expert_parallel.py`.
"""
