"""A program without a model: driven by typical events, proved free of races, timed.

`recording.py` defines the recorded calls, also those of a real run, for the same proof. Start at
`drive.py`, then `prove.py` and `simulate.py`.
"""
