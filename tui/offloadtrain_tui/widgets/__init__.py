"""The widgets of the screens.

They draw the given content in the available cells, and use no runs. Start at `drawn.py`, then
`chart.py`.
"""
