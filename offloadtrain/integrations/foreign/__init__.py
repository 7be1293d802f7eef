"""Checkpoints of other trainers: torch files, folders of torch.distributed.checkpoint, DeepSpeed's.

`reader.py` starts a process of its own, which reads a checkpoint and sends what a model wants;
`__main__.py` is that process. It loads with `safe_load.py` and `dcp_metadata.py`, finds model and
optimizer in `tree.py`, `dcp_folder.py` and `deepspeed_folder.py`, and compares in `match.py`.
Nothing here makes a run: that is `train/saved/convert.py`. Start at `reader.open_foreign`.
"""
