"""Memory and step time of a job, before anything is allocated. No torch.

The plan drives the program of `step` with costs in place of functions: memory comes from the spec,
seconds from machine files. `suggest.py` proposes changes for a job that does not fit, `sweep.py`
and `baselines/` compare with other systems. Nothing is measured here. Start at `plan.plan`.
"""
