"""Tensor parallel: models whose matrices are divided among ranks.

`styles.py` has the hooks that sum and gather, `own_model.py` divides the shipped transformer, and
`transformers_plan.py` divides models of transformers, after `trial.py` has tried their code.
Start at `own_model.py`.
"""
