"""The memory of a step: allocated as its spec requests it, and found by its refs.

What lies where in a bucket is known to the room above, to `engine.bucket`. Start at
`allocation.py`.
"""
