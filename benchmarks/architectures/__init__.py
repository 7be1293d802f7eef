"""What people train, in every placement: `python -m benchmarks.architectures`."""
