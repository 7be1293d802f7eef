"""The operations of a step: a state machine without I/O, events in and operations out.

Update modes, streaming, the paths of gradients and weights, and the disk are policies of it.
Operations name memory and lanes, and have no tensors. Start at `program.Program`, then
`operations.py`.
"""
