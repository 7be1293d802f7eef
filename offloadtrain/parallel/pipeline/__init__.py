"""Pipelines: a model in stages, an engine for each, and the steps of a schedule.

`stage_modules.py` divides a model and cuts it; `decoder_stages.py` those of transformers, which
`decoder_probe.py` tries; `own_forward.py` watches the forwards of all others. `search.py` finds the
fastest division of a job.
Start at `api.pipeline`, then `steps.py`.
"""
