"""The programs of the engine, recorded once: what a rewritten scheduler is held equal to.

`canonical` says what of a program counts, `cases` which runs there are, `runs` and `scripts` what
they do, `programs` keeps what was recorded. `python -m tests.oracle.record` records anew.
"""
