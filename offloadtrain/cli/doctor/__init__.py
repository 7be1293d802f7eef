"""Checks and measurements of this machine."""
