"""Checkpoints: written durably, found, verified and loaded.

Start at `checkpoint.py`, which finds, verifies and prunes them. `save.py` writes one, `restore.py`
loads it. `layout.py` says where tensors lie in a rank's file, `writer.py` and `reader.py` move
their bytes, `manifest.py` lists and checks everything. `disk_space.py` checks the space first.
"""
