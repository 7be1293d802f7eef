"""The monitor of offloadtrain runs.

It reads a run's folder and writes only requests into it; it imports no torch and
nothing of the trainer. `reading/` reads the logs in a thread and keeps their values in columns,
`view_state.py` is all that determines the screen, `panels/` draw it. Start at `app.Monitor`;
docs/architecture.md walks an event's way to a pixel.
"""
