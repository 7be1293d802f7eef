"""What a step is made of, and what happens in it: the spec and the program.

Standard library only; no tensor, no stream, no model. `spec.py` and `memory.py` have the sizes and
places of everything that moves, `program.py` turns events into operations, `simulate.py` predicts
them and `prove.py` proves them. The engine interprets the program, the plan gives it costs.
Start at `spec.StepSpec`, then `program.Program`.
"""
