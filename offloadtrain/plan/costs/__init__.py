"""What a step costs on a machine: seconds of each operation, bytes that torch holds besides ours.

It chooses nothing: values of a machine file go in, seconds and bytes come out. Start at
`costs.Costs`.
"""
