"""Data: text to token files, token files to batches.

Nothing here depends on offload, a model or a job. `source.py` finds files, `records.py` cuts them
into pieces and reads records, `encode.py` and `tokenizer.py` convert records to tokens, `tokens.py`
is the file format, `prepare.py` writes it, and `batches.py` reads it in an order that is the same
for any number of ranks. Start at `batches.py`.
"""
