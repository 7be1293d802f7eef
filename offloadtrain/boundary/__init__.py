"""Where other people's bytes come in and go out: files that may be hostile, text for a terminal.

Standard library only, and it imports nothing of the package: every floor may use it. A file whose
content or name came from outside is opened by `safe_open.py` and nowhere else.
Start at `safe_open.open_regular`.
"""
