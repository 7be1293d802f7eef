"""The boundary to data of others: files that may be hostile, and text for a terminal.

Standard library only, and it imports nothing of the package: every floor may use it. Only
`safe_open.py` opens files whose content or name came from outside; `safe_write.py` writes where
others may have put links. `sanitize.py` and `output.py` keep escape sequences from the terminal.
Start at `safe_open.open_regular`.
"""
