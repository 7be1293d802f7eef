"""What a user asks for: a job, the options of `offload()`, the shape of a model, the errors.

Standard library only; loads in milliseconds. Nothing here reads the machine or knows torch.
`job.py` is a whole job (`load`, `loads`, `dump`), `offload.py` the options of `offload()` and of a
job's table `[offload]`, `toml.py` the reader, `overrides.py` what `--set` changes.
Start at `job.Config`.
"""
