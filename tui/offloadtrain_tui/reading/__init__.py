"""Reading run folders: their search, their logs in columns, and a rank at one moment.

A thread reads for all others; nothing here draws, and nothing writes. Start at `log_reader.py`,
then `history.py`.
"""
