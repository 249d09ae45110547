"""A hook of mkdocs: links out of docs/ (to results, to the README) become plain words, for the site has no such file.

tests/unit/test_docs.py checks that they exist in the checkout; every other link is checked by the strict build.
"""

from __future__ import annotations

import re
from typing import Any

_OUT = re.compile(r"\[([^\]]+)\]\(\.\./[^)]+\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with the text of each page."""
    return _OUT.sub(r"\1", markdown)
