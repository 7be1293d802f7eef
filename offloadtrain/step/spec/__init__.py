"""What there is in a step: blocks, buckets, shards, formats, and where the bytes of each are.

Frozen, and without events: what happens over it is in `program/`. Every memory rule is stated once,
in `memory.py`. Start at `step_spec.StepSpec`.
"""
