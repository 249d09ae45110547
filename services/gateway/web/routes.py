"""Serve the files of the chat page and of the API reference, which need no key: they hold no text of a model.

`/` is the chat for a client that accepts HTML, as browsers do. Any other client gets from `/` what an unknown path
answers.
"""

from __future__ import annotations

from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.http.pages import page

_HERE = Path(__file__).parent
FILES = {
    "/": "chat.html",
    "/docs": "docs.html",
    **{
        f"/web/{name}": name
        for name in (
            "api.js", "chat.css", "chat.js", "docs.css", "docs.js", "icon.svg", "key.js", "markdown.js", "page.css",
            "theme.js",
        )
    },
}  # fmt: skip
"""Path on the API port -> file."""


class Pages:
    """Answer GET and HEAD of FILES; pass everything else on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = FILES.get(scope["path"]) if scope["type"] == "http" and scope["method"] in ("GET", "HEAD") else None
        if name is None or (scope["path"] == "/" and "text/html" not in Headers(scope=scope).get("accept", "")):
            await self._app(scope, receive, send)
            return
        answer = page(_HERE / name)
        if scope["path"] == "/":
            answer.headers["vary"] = "Accept"
        await answer(scope, receive, send)
