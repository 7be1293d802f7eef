"""The commands of `offloadtrain`, each imported on use.

Their modules import nothing heavy at the top: a command's help must appear without torch.
Start at `train.py`.
"""
