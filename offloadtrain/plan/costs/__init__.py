"""The cost of a step on a machine: seconds of each operation, and torch's memory.

Nothing is decided here: values of a machine file go in, seconds and bytes come out. Start at
`costs.Costs`.
"""
