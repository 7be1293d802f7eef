"""Output of a run: its event log, the console, other loggers, and planned against measured figures.

It reads the trainer's state and changes nothing of it. Start at `run_log.RunLog`, which writes the
records of `events.schema`.
"""
