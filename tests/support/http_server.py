"""A small HTTP server on loopback; tests script its answers."""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class Handler(BaseHTTPRequestHandler, ABC):
    """A request, in a thread of its own."""

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    @abstractmethod
    def answer(self) -> None:
        """Reply to the request."""

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def json(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def reply(self, status: int, value: Any, **headers: str) -> None:
        """Answer with a value as JSON. headers: `_` in a name stands for `-`."""
        content = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(content)


class HttpServer(ThreadingHTTPServer):
    """`with HttpServer() as server:` serves at `server.url`; before that it listens and answers nothing."""

    daemon_threads = True
    handler: type[Handler]

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), self.handler)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *args: Any) -> None:
        self.shutdown()
        super().__exit__(*args)
