"""How the engine sits in a user's forward and backward: hooks, saved tensors, casts, activations.

What touches autograd lives here, and nothing that moves a block: these modules tell
`engine.residency` which block is used and `engine.gradients` which gradient is there.
Start at `forward_hooks.py`; what autograd saves is `saved_tensor_hooks.py`, what a forward keeps for
backward `recompute.py` and `activation_offload.py`, working precision `casting.py`.
"""
