"""Policies that only the simulator knows: parts and presets of the literature, and the program of one article.

`engine` runs them; nothing here imports it.
"""
