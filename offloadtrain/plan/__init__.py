"""Memory and step time of a job, before anything is allocated.

`layout.py` runs the engine's partition on the meta device, `tracing/` runs one microbatch over
fake tensors, and `costs/` gives a duration to each operation of the program of `step`. `search/`
finds changes for a job that does not fit, and faster settings; `baselines/` models other systems.
Nothing is measured here. Start at `plan.py`; `plan_model.plan_model` plans a module.
"""
