"""The boundary to foreign data: files that may be hostile, and text for a terminal.

Standard library only, and no imports from the package, so that every layer may use it. Only
`safe_open.py` opens files with foreign content or names; `safe_write.py` writes where others may
have put links. `sanitize.py` and `output.py` keep escape sequences away from the terminal.
Start at `safe_open.open_regular`.
"""
