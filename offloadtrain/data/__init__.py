"""Data: text to token files, token files to batches.

Nothing here knows offload, a model or a job: `documents.py` reads text, `tokenizer.py` makes bytes
of it, `tokens.py` is the file format, `prepare.py` writes it, `batches.py` draws from it in an
order that any number of ranks agrees on. Start at `batches.py`.
"""
