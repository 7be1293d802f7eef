"""Memory, transfers and compute of one step of any module, without its weights or data.

The module's forward and backward run over fake tensors, under the engine's hooks, on lanes that
launch nothing. The result is a `TracedStep` in bytes and FLOPs. Nothing is trained or timed here.
Start at `step.trace_step`.
"""
