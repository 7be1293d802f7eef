"""What a step runs on: lanes, kernels, pinned memory, process groups, devices.

Everything here is told what to do and when: nothing knows a model, an optimizer or a job.
`lanes/` are streams and threads with one interface, `kernels/` the only door to the native module
and to Numba, `arena.py` the host's memory and the Ledger, `process_group.py` the collectives,
`failure_detector.py` watches other ranks. Start at `lanes/base.py`.
"""
