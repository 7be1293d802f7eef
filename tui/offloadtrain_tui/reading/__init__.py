"""Reads run folders: finds runs, reads logs into columns, and returns a rank's state at any time.

One thread reads; nothing in this package draws or writes. Start at `log_reader.py`, then
`history.py`.
"""
