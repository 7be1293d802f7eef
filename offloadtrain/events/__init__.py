"""The run log: what a training process writes and the monitor reads.

Standard library only, and of this project only `config`: a reader must not load torch.
`schema.py` declares every event, `codec.py` turns them into lines, `writer.py` writes them from a
thread of its own, `control.py` carries requests the other way, `alerts.py` watches the figures.
Start at `schema.py`.
"""
