"""What of a run is saved, and what is made of it again: saving, resuming, exports, samples.

The files themselves are the matter of `checkpoint/`. Start at `saving.py`; a trained model:
`trained_model.py`.
"""
