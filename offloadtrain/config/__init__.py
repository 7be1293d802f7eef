"""The user's settings: jobs, the options of `offload()`, model shapes, errors.

Standard library only; loads in milliseconds. Nothing here reads the machine or knows torch.
`job.py` is a whole job (`load`, `loads`, `dump`), `train_options.py` and its like one table each,
`offload.py` the options of `offload()` and the table `[offload]`, `rules.py` the ranges of values,
`toml.py` the reader, `overrides.py` what `--set` changes.
Start at `job.Config`.
"""
