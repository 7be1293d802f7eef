"""Saved state: written durably, found, verified and read back.

`checkpoint.py` saves and loads, `manifest.py` says what files hold and hash to, `tensor_file.py`
writes one file of tensors, `disk_space.py` looks before a save whether it fits.
"""
