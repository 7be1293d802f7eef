"""The spec and the program of a step: its memory, and the operations over it.

Standard library only; no tensor, no stream, no model. `spec.py` and `memory.py` have the sizes and
places of everything that moves, `program.py` turns events into operations, `simulate.py` predicts
them and `prove.py` proves them. The engine interprets the program, the plan gives it costs.
Start at `spec.StepSpec`, then `program.Program`.
"""
