"""Benchmarks shipped with the product, which reproduce figures of the README.

Each compares in one process, in turns, and says which machine it ran on. Start at `adam.py`, whose
turns are in `rounds.py`.
"""
