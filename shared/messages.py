"""Parts of messages for people: numbers with their words, addresses without passwords.

The standard library alone: `make run` says such lines before anything is installed.
"""

from __future__ import annotations

import re

HIDDEN = "********"


def quantity(number: int, thing: str) -> str:
    """Return a number and its thing, as in `1 package` and `2 packages`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def hide_password(url: str) -> str:
    """Return a URL with its password hidden.

    >>> hide_password("redis://:secret@redis:6379/0")
    'redis://:********@redis:6379/0'
    """
    scheme, _, rest = url.partition("://")
    if match := re.match(r"([^/?#]*)@", rest):
        user, colon, _ = match[1].partition(":")
        rest = f"{user}:{HIDDEN}@{rest[match.end() :]}" if colon else f"{HIDDEN}@{rest[match.end() :]}"
    rest = re.sub(r"([?&]password=)[^&]*", rf"\g<1>{HIDDEN}", rest)
    return f"{scheme}://{rest}"
