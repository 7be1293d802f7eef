"""The commands of `offloadtrain`, imported when one is used.

Their modules import nothing heavy at the top: a command's help must appear without torch.
Start at `train.py`.
"""
