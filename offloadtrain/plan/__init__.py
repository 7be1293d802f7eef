"""Memory and step time of a job, before anything is allocated. No torch.

The plan drives the program of `step` with costs in place of functions: memory comes from the spec,
seconds from machine files. `costs/` has what operations take, `search/` changes for a job that does
not fit and faster divisions of it, `baselines/` other systems. Nothing is measured here. Start at
`plan.py`.
"""
