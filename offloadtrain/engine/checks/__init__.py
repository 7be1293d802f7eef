"""What is checked: models, ranks that must agree, calls at the wrong time, foreign readers.

Each check ends in an error that says what to change. Start at `model_checks.py`, which `offload()`
calls first.
"""
