"""The widgets of the screens.

They draw what they are given, in the cells that they have, and know no run. Start at `drawn.py`,
then `chart.py`.
"""
