"""The memory of a step: its buffer table with tensors in it, and the buffer of an address.

Which buffers there are is decided in `step`, not here. Nothing here knows blocks or buckets.
Start at `memory_map.py`.
"""
