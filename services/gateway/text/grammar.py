"""Make grammars in their wire form and compile each once, before its request is accepted.

A process of low priority compiles them (shared/text/grammar_process.py), one at a time, the tenants in turn: however
many grammars a tenant sends, another tenant's waits for one of them. Verdicts are kept, so a grammar that is sent again
waits for none.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from llguidance import LLMatcher

from services.gateway.errors import ApiError, invalid, unavailable
from services.gateway.request import until_deadline
from shared.errors import OrcinusError
from shared.messages import quote
from shared.text import bounded_json
from shared.text.grammar_process import GrammarProcess
from shared.text.grammars import MAX_GRAMMAR_BYTES, TOO_LONG, GrammarEndedError, GrammarError, NoGrammarsError

log = logging.getLogger("orcinus.grammars")

MAX_WAITING = 16
"""Grammars of one tenant that may wait to be compiled; more get a 503."""
MAX_VERDICTS = 4096
OPTIONS = {"whitespace_pattern": r"[ \t\n\r]{0,20}"}
"""Of JSON: with no bound a model may write blanks until its tokens run out."""


@dataclass(slots=True, eq=False)
class _PendingCheck:
    grammar: str
    verdict: asyncio.Future[OrcinusError | None]
    users: int = 0  # requests that wait for it


class GrammarCheck:
    """Compile the grammars of requests. One for each model."""

    def __init__(self, model: Path, vocab_size: int) -> None:
        self.process = GrammarProcess(model, vocab_size)
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._turns: OrderedDict[str, deque[_PendingCheck]] = OrderedDict()  # by tenant, the next one first
        self._checks: dict[tuple[str, bytes], _PendingCheck] = {}  # by tenant and hash
        self._compilation: asyncio.Task[None] | None = None
        self._verdicts: OrderedDict[bytes, OrcinusError | None] = OrderedDict()  # by hash
        self.on_refused: Callable[[str], object] = lambda reason: None

    async def check(self, field: str, grammar: str, tenant: str) -> None:
        """Raise ApiError: 400 that names the field where a worker could not follow the grammar, 503 when too many
        of the tenant's wait, 429 at the deadline of the request.
        """
        try:
            if len(grammar) > MAX_GRAMMAR_BYTES:  # before it is encoded, and hashed
                raise GrammarError(TOO_LONG)
            async with until_deadline():
                error = await self._verdict(grammar, tenant)
            if error is not None:
                raise error.with_traceback(None)
        except ApiError:
            self.on_refused("busy")
            raise
        except NoGrammarsError as error:
            self.on_refused("unavailable")
            raise invalid(field, f"{field}: {error}", "structured_output_unavailable") from error
        except GrammarError as error:
            self.on_refused("ended" if isinstance(error, GrammarEndedError) else "invalid")
            raise invalid(field, f"{field} cannot be used: {error}", "invalid_grammar") from error

    def close(self) -> None:
        """End the process; another grammar starts it again."""
        self.process.close()

    async def _verdict(self, grammar: str, tenant: str) -> OrcinusError | None:
        name = hashlib.sha256(grammar.encode()).digest()
        if name in self._verdicts:
            self._verdicts.move_to_end(name)
            return self._verdicts[name]
        one = self._checks.get((tenant, name)) or self._enqueue(grammar, tenant, name)
        one.users += 1
        try:
            verdict = await asyncio.shield(one.verdict)
        finally:
            one.users -= 1
            if not one.users:
                one.verdict.cancel()  # of no effect once it is there
                self._checks.pop((tenant, name), None)
        if not isinstance(verdict, GrammarEndedError | ApiError):  # which may be a fault of the machine's
            self._verdicts[name] = verdict
        while len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict

    def _enqueue(self, grammar: str, tenant: str, name: bytes) -> _PendingCheck:
        """Put a grammar in its tenant's queue. Raise ApiError when that is full."""
        waiting = self._turns.get(tenant, ())
        if len(waiting) >= MAX_WAITING:
            raise _busy()
        one = self._checks[tenant, name] = _PendingCheck(grammar, asyncio.get_running_loop().create_future())
        self._turns.setdefault(tenant, deque()).append(one)
        if self._compilation is None or self._compilation.done():
            self._compilation = asyncio.create_task(self._compile())
        return one

    async def _compile(self) -> None:
        """Compile until no grammar waits, one of each tenant in turn."""
        loop = asyncio.get_running_loop()
        while self._turns:
            tenant, waiting = self._turns.popitem(last=False)
            one = waiting.popleft()
            if waiting:
                self._turns[tenant] = waiting
            if one.verdict.done():  # its client has left
                continue
            verdict = await loop.run_in_executor(self._thread, self._ask, one.grammar)
            if not one.verdict.done():
                one.verdict.set_result(verdict)

    def _ask(self, grammar: str) -> OrcinusError | None:
        try:
            self.process.check(grammar)
        except OrcinusError as error:
            return error
        except Exception:  # a request must not wait for a verdict that never comes
            log.exception("a grammar could not be compiled")
            return unavailable("grammars: the process that compiles them failed; retry later", "grammars_busy")
        return None


def _busy() -> ApiError:
    text = f"grammars: {MAX_WAITING} of this tenant wait to be compiled, which is the limit; retry later"
    return unavailable(text, "grammars_busy")


def json_grammar(field: str, schema: Any, lenient: bool = False) -> str:
    """Return the grammar of a JSON schema. lenient: ignore keywords that cannot be kept. Raise ApiError."""
    if isinstance(schema, str):
        try:
            schema = bounded_json.parse(schema.encode(), field)
        except bounded_json.JsonError as error:
            raise invalid(field, f"{error}; got {quote(schema)}", error.code) from error
    if not isinstance(schema, dict):
        raise invalid(field, f"{field} must be a JSON schema, an object; got {quote(schema)}")
    if len(orjson.dumps(schema)) > MAX_GRAMMAR_BYTES - 1024:
        raise invalid(field, f"{field} has more than {MAX_GRAMMAR_BYTES - 1024} bytes; send a smaller schema")
    return LLMatcher.grammar_from_json_schema({**schema, "x-guidance": {**OPTIONS, "lenient": lenient}})


def choice_grammar(choices: Iterable[str]) -> str:
    """Return the grammar of one of several texts."""
    return LLMatcher.grammar_from_regex("|".join(map(re.escape, choices)))


def lark_text(text: str) -> str:
    """Return a literal of a Lark grammar."""
    return json.dumps(text)
