"""Weights, master weights and moments: loaded, viewed, saved and rescued.

Here an engine at rest and a `state_dict` meet; nothing here runs inside a step. Start at
`state_io.py`; weights alone: `weights_io.py`.
"""
