"""The run log, written by training and read by the monitor.

Standard library only, and of this project only `config`: a reader must not load torch.
`schema.py` declares every event, `log_lines.py` turns them into lines, `writer.py` writes them from
a thread of its own, `control.py` carries requests the other way, `alerts.py` watches the figures.
Start at `schema.py`.
"""
