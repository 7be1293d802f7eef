"""Tensor parallel: models whose matrices are divided among ranks.

`styles.py` has the hooks that sum and gather, `own_model.py` divides the shipped transformer,
`transformers_plan.py` models of transformers, whose own code `trial.py` tries in parts.
Start at `own_model.py`.
"""
