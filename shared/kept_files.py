"""The names of files in which the KV of a worker outlives it: `<host tier>-<rank>.<owner>.kept`.

Workers make them and remove those that no request needs; the launcher removes what is left at the end of a stack.
"""

from __future__ import annotations

import hashlib


def owner_of(model: str, shard: str) -> str:
    """Return the owner in the name of a kept file, 16 hex digits: only its workers remove the file.

    model: the served model name. shard: that of the scheduler that led the worker.

    >>> owner_of("demo", "shard-0")
    '298ae2017bd8b312'
    """
    return hashlib.sha256(f"{model}\n{shard}".encode()).hexdigest()[:16]
