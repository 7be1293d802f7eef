"""Data: text to token files, token files to batches. It knows nothing of offload."""
