"""The user's settings: jobs, the options of `offload()`, model shapes, errors.

Standard library only; imports in milliseconds. Nothing here reads the machine or imports torch.
`job.py` has the whole job (`load`, `loads`, `dump`) and the effects of `--set`, `sections.py` has
the tables of a job and the ranges of their values, `offload.py` has the options of `offload()` and
the table `[offload]`, `toml.py` is the reader.
Start at `job.Config`.
"""
