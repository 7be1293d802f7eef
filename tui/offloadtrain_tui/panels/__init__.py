"""The screens, one file each; each shows a `Shown` and knows nothing of files or time."""
