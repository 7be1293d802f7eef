"""Checkpoints: written durably, found, verified and loaded.

`checkpoint.py` saves and loads, `manifest.py` lists files and hashes, `tensor_file.py` writes one
file of tensors, `disk_space.py` checks the space before a save.
"""
