"""The command line: `offloadtrain COMMAND`. stdout is data, stderr narrates.

Nothing is imported from here but by tests and benchmarks. `main.py` names the commands and loads
each when it is used, `commands/` holds one file each, `jobs/` the shipped job files; `doctor/`,
`bench/` and `results/` are what the larger commands are made of. Start at `main.py`.
"""
