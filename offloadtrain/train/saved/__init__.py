"""Runs made of checkpoints of other trainers, and the other way round.

`convert.py` makes a run folder from a foreign checkpoint; `convert_to_torch.py` writes a checkpoint
for torch. The files of our own checkpoints are in `checkpoint/`. Start at `convert.py`.
"""
