"""Models: a decoder-only transformer and sampling from it. They know nothing of offload."""
