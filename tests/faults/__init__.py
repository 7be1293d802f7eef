"""Planted faults: what `make test-faults` plants, and how it does so.

`catalogue.py` says what a fault is; the lists are `*.toml`, one for each part of the source.
`run.py` is the command, `native_build.py` the build of the extension with switches, `worker.py` the
process that runs the tests. `test_catalogue.py` is part of `make test`: every fault must still
apply.
"""
