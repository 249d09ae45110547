"""The gateway's end of the process that renders the chat template (chat_process.py).

One process for a template, started when it is first needed, and again when it has died or did not answer in time.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import weakref
from typing import Any

import jinja2
import orjson

from services.gateway.text.template_environment import environment
from services.gateway.text.template_process import FAILED, MOST_CHARS, REFUSED, receive, send
from shared.settings import ROOT

MEMORY_BYTES = 256 << 20
"""Of the process, all together. A conversation of 4 MiB takes some 50."""
PATIENCE = 10
"""An answer may take so many times the template's processor time: the machine may be busy."""


class RenderError(Exception):
    """What a template did that it may not, or could not do."""


class Renderer:
    """One template. `render` blocks and may be called by several threads; one at a time is served."""

    def __init__(self, source: str, timeout_s: float) -> None:
        """Raises jinja2.TemplateSyntaxError. Nothing of the template runs, or is folded, in this process."""
        environment().parse(source)
        self._first = orjson.dumps({"source": source, "seconds": timeout_s, "bytes": MEMORY_BYTES})
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._end = weakref.finalize(self, _nothing)

    @property
    def pid(self) -> int | None:
        """Of the process, if it runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def render(self, **context: Any) -> str:
        """The text. `context`: JSON values.

        Raises jinja2.TemplateError with the template's own words, RenderError for all else.
        """
        payload = orjson.dumps(context)
        with self._lock:
            answer = self._ask(payload)
        kind, text = answer[:1], answer[1:].decode("utf-8", "surrogatepass")
        if kind == REFUSED:
            raise jinja2.TemplateError(text)
        if kind == FAILED:
            raise RenderError(text)
        return text

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._end()

    def _ask(self, payload: bytes) -> bytes:
        connection = self._connected()
        try:
            connection.settimeout(PATIENCE * self._timeout_s)
            send(connection, payload)
            answer = receive(connection, 4 * MOST_CHARS + 1)
        except (OSError, ValueError) as error:
            self._end()
            raise RenderError(f"the process that renders it gave no answer: {error}") from error
        if not answer:
            self._end()
            raise RenderError("the process that renders it died")
        return answer

    def _connected(self) -> socket.socket:
        if self._connection is not None and self.pid is not None:
            return self._connection
        self._end()
        ours, theirs = socket.socketpair()
        with theirs:
            # No environment: no key or password of the gateway's is within a template's reach.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "services.gateway.text.template_process"], stdin=theirs, cwd=ROOT, env={}
            )
        self._connection = ours
        self._end = weakref.finalize(self, _stop, self._process, ours)
        send(ours, self._first)
        return ours


def _stop(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    process.kill()
    with contextlib.suppress(OSError):
        process.wait()


def _nothing() -> None:
    """There is no process yet."""
