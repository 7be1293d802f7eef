"""The commands of `offloadtrain`, one module each, imported when the command is used.

Their modules import nothing heavy at the top: a command's help must appear without torch.
Start at `train.py`.
"""
