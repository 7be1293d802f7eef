"""The monitor of offloadtrain runs.

It reads a run's folder, and writes only requests into it; it imports neither torch nor the trainer.
`reading/` reads the logs in a thread and stores their values in columns, `view_state.py` contains
everything that determines the screen, and `panels/` draw it. Start at `app.Monitor`;
docs/architecture.md follows an event from the log to the screen.
"""
