"""Answer with the files of a page, under headers that let a browser load, frame and send nothing foreign."""

from __future__ import annotations

from pathlib import Path

from starlette.responses import Response

PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def page(file: Path) -> Response:
    """Return one file of a page."""
    return Response(file.read_bytes(), headers=PAGE_HEADERS, media_type=_TYPES[file.suffix])
