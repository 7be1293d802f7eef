"""Execution resources of a step: lanes, kernels, pinned memory, process groups, devices.

Callers decide what runs and when: nothing here depends on a model, an optimizer or a job.
`lanes/` are streams and threads with one interface, `kernels/` the only users of the native module
and of Numba, `arena.py` the host memory and the Ledger, `process_group.py` the collectives;
`failure_detector.py` watches other ranks. Start at `lanes/base.py`.
"""

from offloadtrain.runtime.torchao_logs import drop_import_messages

drop_import_messages()
