"""Checkpoints and configurations of other trainers: plain torch loops, FSDP, DeepSpeed.

`run_import.py` converts a checkpoint to a run, `torch_export.py` a run to a checkpoint; only
commands import this package. Foreign files may be hostile: `reader.py` starts a process that reads
them (`reader_process.py`) and matches their tensors with the job's model. `deepspeed_config.py`
translates a DeepSpeed configuration. Start at `run_import.py`.
"""
