"""The machine and its load: cores, cgroups, host memory, GPUs, disks, machine files.

Without torch: probes that need torch are in `runtime`. Only `nvml.py` imports NVML, and only
`telemetry.py` imports psutil; `atomic_io.py` writes files durably.
Nothing here depends on the trained model. Start at `telemetry.probe`; `machine.py` reads machine
files.
"""
