"""Keep the pauses of Python's garbage collector short in a process that serves.

A full collection walks every object of the process: about 0.1 s for those of the imported libraries, and as much again
for a few thousand requests. With Python's own thresholds a busy gateway has one every few seconds.
"""

from __future__ import annotations

import gc

THRESHOLDS = 2000, 10, 50
"""New objects for a collection of the young ones, such collections for one of the middle-aged, and those for a full
one: a million new objects, where Python's 700, 10 and 10 make it 70,000.
"""


def settle() -> None:
    """Take what lives now out of all later collections; call it when the process is about to serve."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
