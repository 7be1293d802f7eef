"""What a machine is and how it does: cores, cgroups, host memory, GPUs, disks, machine files.

No torch: what needs it to look at a machine is in `runtime`. This is the only door to NVML
(`nvml.py`) and to psutil (`telemetry.py`), and files are written durably here (`atomic_io.py`).
Nothing knows what trains. Start at `telemetry.probe`; machine files are read by `machine.py`.
"""
