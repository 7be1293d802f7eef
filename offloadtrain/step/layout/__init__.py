"""The static layout of a step: blocks, buckets, shards, formats, and the buffers of each.

Frozen, and without events: the operations are in `program/`. Every rule about memory is
stated once: `step_spec.py` has the rules, `buffer_table.py` derives the table of all buffers from
them. Start at `buffers.BufferTable`.
"""
