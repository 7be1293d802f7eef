"""Checkpoints: written durably, found, verified and loaded.

Start at `checkpoint.py`, which finds, verifies and prunes them. `save.py` writes a checkpoint.
`restore.py` loads it, or decodes its weights without an optimizer. `manifest.py` lays out tensors
in a rank's file, and lists and checks everything. `reader.py` reads their bytes.
"""
