"""LoRA adapters of a worker: `peft` reads one of the store, `table` keeps those of a Run by number.

What a linear layer adds for its rows is in `models/adapters.py`, which this package imports.
"""
