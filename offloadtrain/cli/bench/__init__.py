"""What `offloadtrain bench` measures of a user's machine: CPU Adam, and a drive.

Each compares in one process, in turns, and says which machine it ran on. Start at `adam.py`, whose
turns are in `rounds.py`.
"""
