"""Checks and measurements of this machine: `offloadtrain doctor`.

With `--save` the measurements become a machine file for `plan`. No setting of the machine
is changed. Start at `examine.py`.
"""
