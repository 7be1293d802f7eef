"""The user's settings: jobs, the options of `offload()`, model shapes, errors.

Standard library only; loads in milliseconds. Nothing here reads the machine or knows torch.
`job.py` is a whole job (`load`, `loads`, `dump`), `offload.py` the options of `offload()` and of a
job's table `[offload]`, `toml.py` the reader, `overrides.py` what `--set` changes.
Start at `job.Config`.
"""
