"""The spec and the program of a step: its memory, and the operations over it.

Standard library only; no tensor, no stream, no model. `layout/` has the sizes and places of
everything that moves, `program/` turns events into operations, `proof/` predicts and proves them.
The engine interprets the program, the plan assigns costs to it. Start at `step_spec.StepSpec`, then
`program.Program`.
"""
