"""Benchmarks shipped with the product, which reproduce figures of the README."""
