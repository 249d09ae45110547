"""Logging: one line per event on stderr, as text or as JSON."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import orjson

MODEL = "LOG_MODEL"
"""The environment variable with the model of a process that shares its output with those of other models."""


def _escape(char: str) -> str:
    """Return a character as in a string of Python."""
    return char.encode("unicode_escape").decode()


def _json_escaped(char: str) -> str:
    """Return a character as in a string of JSON."""
    return "\\u" + char.encode("utf-16-be").hex(",", 2).replace(",", "\\u")


class _Text(logging.Formatter):
    """A message is one line: what it quotes, as a path, neither begins another one nor drives a terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        return _printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        return "\n".join(map(_printable, super().formatException(ei).split("\n")))


def _printable(text: str, escape: Callable[[str], str] = _escape) -> str:
    """Return text with escapes in place of what cannot be printed."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else escape(char) for char in text)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S"),
            "level": record.levelname,
            "logger": record.name,
            "text": record.getMessage(),
        }
        if model := os.environ.get(MODEL):
            line["model"] = model
        line |= getattr(record, "fields", {})  # of a line of the request log
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return _printable(orjson.dumps(line).decode(), _json_escaped)


def setup(service: str, level: str = "info", as_json: bool = False) -> logging.Logger:
    """Configure the root logger and return the logger of the service. No service logs prompts or keys."""
    handler = logging.StreamHandler(sys.stderr)
    if as_json:
        handler.setFormatter(_Json())
    else:
        model = os.environ.get(MODEL, "").replace("%", "%%")
        text = f"%(asctime)s %(levelname)s %(name)s{' of ' if model else ''}{model}: %(message)s"
        handler.setFormatter(_Text(text, "%Y-%m-%d %H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("asyncio", "grpc", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    return logging.getLogger(f"orcinus.{service}")
