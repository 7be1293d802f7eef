"""What one step of any module needs, moves and computes, without its weights or its data.

The module's own forward and backward run over fake tensors, under the engine's hooks, on lanes that
launch nothing. The result is a `TracedStep`. Nothing is trained here, and no seconds are known.
Start at `step.trace_step`.
"""
