"""The screens, one file each.

Each displays a `ViewState` and knows nothing of files or time. Start at `base.py`, then
`overview.py`.
"""
