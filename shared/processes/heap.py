"""Keep the pauses of Python's garbage collector short in a process that serves.

A full collection walks every object of the process: about 0.1 s for those of the imported libraries, and up to a
second for a few thousand requests that wait. With Python's own thresholds a busy gateway has one every few seconds.
Requests and connections end without reference cycles, so a full collection finds next to nothing.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

THRESHOLDS = 2000, 1, 5000
"""New objects for a collection of the young ones, such collections for one of the middle-aged, and those for a full
one: ten million new objects, where Python's 700, 10 and 10 make it 70,000. Each object is looked at twice, as a young
and as a middle-aged one; ten collections of the young for one of the middle-aged let that one take 40 ms of a gateway
under overload instead of 16.
"""


@contextlib.contextmanager
def freeze_imports() -> Iterator[None]:
    """Import a service within the block without collections, and take what it made out of all later ones: nearly all of
    it stays, and looking it over again and again takes a fifth of the time of an import of torch.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def settle() -> None:
    """Take what lives now out of all later collections; call it when the process is about to serve."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
