"""Name the files of the chat page and of the API reference, which `http.protocol.Pages` serves without a key.

They hold no text of a model.
"""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent
FILES = {
    "/": _HERE / "chat.html",
    "/docs": _HERE / "docs.html",
    **{
        f"/web/{name}": _HERE / name
        for name in (
            "api.js", "chat.css", "chat.js", "docs.css", "docs.js", "icon.svg", "key.js", "markdown.js", "page.css",
            "theme.js",
        )
    },
}  # fmt: skip
"""Path on the API port -> file."""
