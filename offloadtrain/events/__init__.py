"""The run log, written by training and read by the monitor.

Standard library only, and of this project only `config`: a reader must not load torch.
`schema.py` declares every event, `log_lines.py` converts events to lines, `writer.py` writes them
from its own thread, `control.py` carries requests to the run, `alerts.py` watches the figures.
Start at `schema.py`.
"""
