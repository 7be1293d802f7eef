"""What a run tells: records of its log, the console, planned beside measured figures.

It reads the trainer's state and changes nothing of it. Start at `run_log.RunLog`, which writes the
records of `events.schema`.
"""
