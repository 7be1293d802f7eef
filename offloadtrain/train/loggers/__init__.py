"""Copies of a run's scalars for other tools: CSV, JSON lines, TensorBoard, Weights & Biases.

`loggers.py` takes the events of the run log and gives each logger a thread; a module per logger.
A logger's package is imported on its thread, when the first row is there. Start at `loggers.py`.
"""
