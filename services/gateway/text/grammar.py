"""Make grammars in their wire form and compile each once, before its request is accepted.

llguidance bounds a compilation by counting work (shared/grammars.py), so a thread is enough: at most a fraction of a
second, the same verdict as the worker's, and no request waits for another's but through a short queue.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
from llguidance import LLMatcher

from services.gateway.errors import invalid, shown, unavailable
from shared.grammars import MOST_GRAMMAR_BYTES, GrammarError, Grammars, NoGrammarsError

MOST_WAITING = 64
"""Grammars that may wait to be compiled; more get a 503."""
OPTIONS = {"whitespace_pattern": r"[ \t\n\r]{0,20}"}
"""Of JSON: with no bound a model may write blanks until its tokens run out."""


class GrammarCheck:
    """Compile the grammars of requests. One for each model."""

    def __init__(self, model: Path, vocab_size: int) -> None:
        self._grammars = Grammars(model, vocab_size)
        self._threads = ThreadPoolExecutor(1, "grammars")
        self._waiting = 0

    async def check(self, field: str, grammar: str) -> None:
        """Raise ApiError: 400 that names the field where a worker could not follow the grammar, 503 when too many
        wait.
        """
        if self._waiting >= MOST_WAITING:
            raise unavailable("too many grammars are waiting to be compiled; retry later", "grammars_busy")
        self._waiting += 1
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._grammars.matcher, grammar)
        except NoGrammarsError as error:
            raise invalid(field, f"{field}: {error}", "structured_output_unavailable") from error
        except GrammarError as error:
            raise invalid(field, f"{field} cannot be used: {error}", "invalid_grammar") from error
        finally:
            self._waiting -= 1


def json_grammar(field: str, schema: Any, lenient: bool = False) -> str:
    """Return the grammar of a JSON schema. lenient: ignore keywords that cannot be kept. Raise ApiError."""
    if isinstance(schema, str):
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError as error:
            raise invalid(field, f"{field} is not valid JSON: {error}; got {shown(schema)}") from error
    if not isinstance(schema, dict):
        raise invalid(field, f"{field} must be a JSON schema, an object; got {shown(schema)}")
    if len(orjson.dumps(schema)) > MOST_GRAMMAR_BYTES - 1024:
        raise invalid(field, f"{field} has more than {MOST_GRAMMAR_BYTES - 1024} bytes")
    return LLMatcher.grammar_from_json_schema({**schema, "x-guidance": {**OPTIONS, "lenient": lenient}})


def choice_grammar(choices: Iterable[str]) -> str:
    """Return the grammar of one of several texts."""
    return LLMatcher.grammar_from_regex("|".join(map(re.escape, choices)))


def lark_text(text: str) -> str:
    """Return a literal of a Lark grammar."""
    return json.dumps(text)
