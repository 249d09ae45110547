"""Keep the pauses of Python's garbage collector short in a process that serves.

A full collection walks every object of the process: about 0.1 s for those of the imported libraries, and up to a
second for a few thousand requests that wait. With Python's own thresholds a busy gateway has one every few seconds.
Requests and connections end without reference cycles, so a full collection finds next to nothing.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

THRESHOLDS = 2000, 1, 2000
"""A collection of young, middle-aged or all objects comes when its count is beyond the threshold: a count of new
objects, of collections of the young since the last of the middle-aged, and of those since the last full one. So every
third collection looks at the middle-aged, at most 6,003 objects, and a full one comes after twelve million new objects;
with Python's 700, 10 and 10 it comes after 0.1 million. A threshold of 10 for the middle-aged let such a collection
take 40 ms of a gateway under overload instead of 16.

Python 3.14.0 to 3.14.4 have neither middle-aged objects nor full collections. There a collection of the young also
looks at a part of the old, which is larger the smaller the second threshold is.
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
