"""The engine's hooks in a user's forward and backward: saved tensors, recompute, casts.

All code that touches autograd lives here; no code here moves a block: these modules report uses
of blocks to `engine.block`. `saved_tensors.py` replaces saved weights by handles, `recompute.py`
and `offload.py` handle activations, `casting.py` handles the working precision. Start at
`forward_hooks.py`.
"""
