"""A run: from a resolved job to a trained model, with its folder, its log and its checkpoints.

`build.py` assembles model, data and engine. `trainer.py` is the loop. `run_folder.py` owns a run's
files and finds the run to resume. `log/` writes its events. `saving.py` saves and restores it with
the files of `checkpoint/`. `emergency.py` saves it after a failure of the device.
`update_choice.py` compares update modes.
Nothing here parses a command line or imports the monitor.
Start at `trainer.Trainer.train`.
"""
