"""The files of the live page. No key is asked for them: they hold no figure; the events do."""

from __future__ import annotations

from pathlib import Path

from starlette.responses import Response

_HERE = Path(__file__).parent
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
FILES = {
    "/dashboard": "page.html",
    "/dashboard/page.css": "page.css",
    "/dashboard/page.js": "page.js",
    "/dashboard/charts.js": "charts.js",
    "/dashboard/feed.js": "feed.js",
    "/dashboard/format.js": "format.js",
    "/dashboard/replicas.js": "replicas.js",
    "/dashboard/icon.svg": "icon.svg",
    "/dashboard/uPlot.js": "vendor/uPlot.iife.min.js",
    "/dashboard/uPlot.css": "vendor/uPlot.min.css",
}
"""Path on the ops port -> file."""

EVENTS = "/dashboard/events"


def page(path: str) -> Response:
    """The file behind a path of FILES."""
    file = _HERE / FILES[path]
    return Response(file.read_bytes(), media_type=_TYPES[file.suffix])
