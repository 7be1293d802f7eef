"""The command line: `offloadtrain COMMAND`. stdout is for data, stderr for messages.

Only tests and benchmarks import this package. `main.py` lists the commands and imports each on use,
`commands/` contains them by theme, `jobs/` the shipped job files. `doctor/` and `bench/` implement
the larger commands; `supervisor.py` watches the ranks of `train --nproc`.
Start at `main.py`.
"""
