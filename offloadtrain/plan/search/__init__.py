"""Plans beside each other: what fits, what is faster, what other trainers would take.

Each candidate is a whole plan of the room above; there is no second formula. Start at
`suggest.py`.
"""
