"""What happens in a step: a state machine without I/O, events in and operations out.

Update modes, streaming, the ways down and up, and the disk are policies of it. Operations name
memory and lanes, and know no tensor. Start at `program.Program`, then `operations.py`.
"""
