"""Frameworks with and without offload, on the same data: `python -m benchmarks.frameworks`."""
