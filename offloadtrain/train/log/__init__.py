"""Output of a run: event log, console, other loggers, and the comparison with the plan.

It reads the trainer's state and never changes it. Start at `run_log.RunLog`, which writes the
records of `events.schema`.
"""
