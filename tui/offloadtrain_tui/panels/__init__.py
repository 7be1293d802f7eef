"""The screens, one per file.

Each displays a `ViewState`, and uses no files and no clock. Start at `base.py`, then
`overview.py`.
"""
