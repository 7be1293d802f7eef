"""Measurements that ship with the product: what a figure of the README is reproduced with."""
