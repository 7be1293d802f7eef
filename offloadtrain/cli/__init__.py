"""The command line: `offloadtrain COMMAND`. stdout is for data, stderr for messages.

Only tests and benchmarks import this package. `main.py` names the commands and loads each on use,
`commands/` has one file per command, `jobs/` the shipped job files; `doctor/`, `bench/` and
`results/` implement the larger commands, and `supervisor.py` watches the ranks that
`train --nproc` starts.
Start at `main.py`.
"""
