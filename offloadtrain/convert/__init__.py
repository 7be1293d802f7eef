"""Checkpoints and configurations of other trainers: plain torch loops, FSDP, DeepSpeed.

`run_import.py` makes a run of a checkpoint, `torch_export.py` a checkpoint of a run; only commands
import this package. Files of others may be hostile: `reader.py` starts a process that reads them
(`reader_process.py`) and matches their tensors with the job's model. `deepspeed_config.py`
translates a DeepSpeed configuration. Start at `run_import.py`.
"""
