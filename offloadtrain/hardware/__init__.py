"""The machine and its load: cores, cgroups, host memory, GPUs, disks, machine files.

No torch: probes that need it are in `runtime`. Only `nvml.py` imports NVML, and only `telemetry.py`
psutil; `atomic_io.py` writes files durably.
Nothing here knows what is trained. Start at `telemetry.probe`; machine files are read by
`machine.py`.
"""
