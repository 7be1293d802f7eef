"""The screens, one file each; each displays a `ViewState` and knows nothing of files or time."""
