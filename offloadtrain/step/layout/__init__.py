"""What there is in a step: blocks, buckets, shards, formats, and the buffers of each.

Frozen, and without events: what happens over it is in `program/`. Every rule about memory is
stated once: `step_spec.py` has the rules, `buffer_table.py` makes the table of all buffers of them.
Start at `buffers.BufferTable`.
"""
