"""Searches over plans: what fits, what is faster, and what other trainers would need.

Each candidate is a complete plan of `plan/`; there is no second formula. Start at
`suggest.py`.
"""
