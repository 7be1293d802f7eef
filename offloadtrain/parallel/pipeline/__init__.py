"""Pipelines: a model in stages, an engine for each stage, and the steps of a schedule.

`stage_modules.py` divides and cuts a model; `decoder_stages.py` cuts transformers models, and
`decoder_probe.py` verifies them; `own_forward.py` verifies all other models. `search.py` finds the
fastest division of a job.
Start at `api.pipeline`, then `steps.py`.
"""
