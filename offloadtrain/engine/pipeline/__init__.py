"""Pipelines: a model in stages, an engine for each, and the steps of a schedule.

`decoder_stages.py` divides models of transformers, which `decoder_probe.py` tries; `own_forward.py`
watches all others. Start at `pipeline.pipeline`, then `pipeline_steps.py`.
"""
