"""Everything that is measured on a GPU, by one command: `python -m benchmarks.gpu --out DIR`.

Standard library, torch and offloadtrain's engine: neither the command line's packages nor the
monitor's are needed, and nothing is downloaded.
"""
