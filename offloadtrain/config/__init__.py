"""The user's settings: jobs, the options of `offload()`, model shapes, errors.

Standard library only; loads in milliseconds. Nothing here reads the machine or knows torch.
`job.py` is a whole job (`load`, `loads`, `dump`) and what `--set` changes, `sections.py` has its
tables and the ranges of their values, `offload.py` the options of `offload()` and the table
`[offload]`, `toml.py` the reader.
Start at `job.Config`.
"""
