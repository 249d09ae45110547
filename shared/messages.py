"""Parts of messages for people: numbers with their words, values cut to a line, addresses without passwords.

The standard library alone: `make run` says such lines before anything is installed.
"""

from __future__ import annotations

import re

HIDDEN = "********"


def quantity(number: int, thing: str) -> str:
    """Return a number and its thing, as in `1 package` and `2 packages`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def shorten(text: str, most: int = 60) -> str:
    """Return a text of at most `most` characters; dots stand for the rest.

    >>> shorten("a long name", 8)
    'a lon...'
    """
    return text if len(text) <= most else text[: most - 3] + "..."


def quote(value: object, most: int = 80) -> str:
    """Return a value as it may stand in a message: as Python writes it, short, one line."""
    return shorten(repr(value), most)


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
