"""Checkpoints: written durably, found, verified and loaded.

Start at `checkpoint.py`, which finds, verifies and prunes them. `save.py` writes one, `restore.py`
loads it, `saved_weights.py` decodes its weights without an optimizer. `layout.py` says where
tensors lie in a rank's file, `reader.py` reads their bytes, `manifest.py` lists and checks
everything.
"""
