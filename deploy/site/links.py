"""A hook of mkdocs that turns links out of docs/ into plain text, because the site lacks those files.

tests/unit/test_docs.py checks that they exist in the checkout; every other link is checked by the strict build.
"""

from __future__ import annotations

import re
from typing import Any

_OUT = re.compile(r"\[([^\]]+)\]\(\.\./[^)]+\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the text of a page with these links replaced; mkdocs calls it for each page."""
    return _OUT.sub(r"\1", markdown)
