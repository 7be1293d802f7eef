"""The monitor of offloadtrain runs: reads event files, never the trainer."""
