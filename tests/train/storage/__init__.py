"""Faults of storage, one set each: kills, loss of power, errors of the disk, damage.

Each set is a list of cases; `tests/train/test_storage_faults.py` runs a slice, and `python -m
benchmarks.storage_faults` all of them.
"""
