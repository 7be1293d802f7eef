"""Benchmarks of `offloadtrain bench` on a user's machine: CPU Adam, a step, ranks, and a drive.

Each alternates its cases, and records the machine. Start at `adam.py`; the rounds are in
`rounds.py`.
"""
