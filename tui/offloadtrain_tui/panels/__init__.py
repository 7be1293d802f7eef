"""The screens, one file each; each shows a `ViewState` and knows nothing of files or time."""
