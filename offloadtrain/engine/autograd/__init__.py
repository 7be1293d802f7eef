"""How the engine sits in a user's forward and backward: hooks, saved tensors, casts, activations.

What touches autograd lives here, and nothing that moves a block: these modules tell
`engine.residency` which block is used and `engine.gradients` which gradient is there.
`saved_tensor_hooks.py` stands for saved weights, `recompute.py` and `activation_offload.py` for
what a forward keeps, `casting.py` for working precision. Start at `forward_hooks.py`.
"""
