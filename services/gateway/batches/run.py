"""Take one batch through its statuses, under one epoch of its lease.

Each line is sent under a name made of the batch and its number, so a line that an earlier gateway began is not begun
again: its request goes on, and its answer is read. A request that Redis has lost is computed again. An answer is a row
of the journal before it is counted. Cancelled by the driver, a run leaves all as it is for the next epoch.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
from starlette.types import ASGIApp

from services.gateway.auth import Caller
from services.gateway.batches.files import FileStore, new_id
from services.gateway.batches.handler import Exchange
from services.gateway.batches.journal import Journal, rows, whole_bytes, write_outputs
from services.gateway.batches.lines import InputLines, seed_of
from services.gateway.batches.records import BatchOrder, BatchState, BatchStore, OpenBatch, Outdated
from services.gateway.metrics import Metrics
from shared.batch_lines import RETRIED, Line, answer_line
from shared.tasks import end

log = logging.getLogger("orcinus.gateway")

WATCH_S = 1.0
"""Interval at which a run looks for a cancel and for the end of its window, and writes its counts."""
FIRST_WAIT_S, MAX_WAIT_S = 0.25, 30.0
FAULT_TRIES = 3
"""Times that a line is computed if Redis loses its request."""
LOST = frozenset({"record_lost", "request_not_found", "idempotency_key_reused"})
"""Errors behind which the line is computed again, under another name; the last one where another version named it."""
AGAIN = frozenset({"taken_over"})
"""Errors behind which the same request can be read."""
FINAL = frozenset({"deadline_unreachable", "slo_unreachable"})
"""Refusals that a line brings on itself."""
EXPIRED = "the completion window ended before this request ran; send it in another batch, or with a longer window"
GONE = "the key that created the batch is revoked or expired; create the batch with another key"
FULL = "files and batches have used up their quota of bytes; delete files, then send what has no answer again"
ROOM_ROUNDS = 10
"""Looks between two of which the bytes of the tenant are counted."""
UNSEEDED = "/v1/embeddings"
"""The endpoint whose bodies have no seed."""


class KeyGone(Exception):  # noqa: N818 - an event, not an error
    """The key of the batch is revoked or expired."""


@dataclass(frozen=True, slots=True)
class Means:
    """What all runs of a gateway share."""

    app: ASGIApp
    files: FileStore
    batches: BatchStore
    caller: Callable[[str], Caller | None]  # of the key with this id
    cancel: Callable[[str, str], Awaitable[Any]]  # a request of a tenant
    slots: asyncio.Semaphore  # one for each line in the queue or running
    requests: int  # of them
    most_line_bytes: int
    metrics: Metrics


class Run:
    """One batch under one epoch."""

    def __init__(self, means: Means, batch: OpenBatch, order: BatchOrder, epoch: int) -> None:
        self._means = means
        self._batch = batch
        self._order = order
        self._epoch = epoch
        self._state = BatchState()
        self._folder = means.batches.folder(batch.owner, batch.id)
        self._running: dict[int, Exchange] = {}

    async def run(self) -> None:
        """Run to the end of the batch. Raise Outdated, OSError."""
        batches = self._means.batches
        with closing(await asyncio.to_thread(self._begin)) as journal, closing(self._input()) as lines:
            problems = await asyncio.to_thread(lines.check, self._order.endpoint, self._means.most_line_bytes)
            if problems:
                failed = self._state.moved("failed", time.time(), errors=problems)
                await asyncio.to_thread(batches.close, self._batch, failed)
                return
            counted = await asyncio.to_thread(rows, self._folder, self._state.sealed, self._epoch)
            bad = sum(row.is_failed for row in counted.values())
            self._state = replace(self._state, total=len(lines), completed=len(counted) - bad, failed=bad)
            if self._state.status == "validating":
                self._state = self._state.moved("in_progress", time.time())
            await self._write()
            todo = [number for number in lines.order() if number not in counted]
            writer = Writer(journal)
            ending = await self._answer(lines, todo, writer)
            await self._finish(ending, lines, journal)

    def _input(self) -> InputLines:
        return InputLines(self._folder / "input")

    def _begin(self) -> Journal:
        self._state = self._means.batches.take_over(self._batch, self._epoch, whole_bytes)
        return Journal(self._folder, self._epoch)

    async def _write(self) -> None:
        await asyncio.to_thread(self._means.batches.write, self._batch, self._state)

    # Lines

    async def _answer(self, lines: InputLines, todo: list[int], writer: Writer) -> str:
        """Answer lines until all are, or the batch has to end; return the status that it ends with."""
        if todo and (ending := await self._must_end()):
            return ending
        answering = asyncio.create_task(self._send(lines, todo, writer))
        watching = asyncio.create_task(self._watch())
        ending = "completed"
        try:
            await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                ending = watching.result()
            else:
                answering.result()
        except KeyGone:
            ending = self._fails("invalid_api_key", GONE)
        finally:
            await end(answering, watching)
            await writer.close()
        if ending != "completed":
            await self._cancel_running()
        return ending

    async def _send(self, lines: InputLines, todo: list[int], writer: Writer) -> None:
        """Answer all lines that are to do, several at a time. Raise the first error."""
        waiting = iter(todo)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._means.requests, len(todo))):
                    group.create_task(self._send_all(lines, waiting, writer))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    def _fails(self, code: str, message: str) -> str:
        """Note why the batch fails, and return that status."""
        problem = {"code": code, "message": message, "param": None, "line": None}
        self._state = replace(self._state, errors=[problem])
        return "failed"

    async def _watch(self) -> str:
        """Return the status that the batch ends with as soon as it has to."""
        written, rounds = self._state, 0
        while not (ending := await self._must_end(counts_bytes=rounds % ROOM_ROUNDS == 0)):
            if self._state != written:
                written = self._state
                await self._write()
            await asyncio.sleep(WATCH_S)
            rounds += 1
        return ending

    async def _must_end(self, counts_bytes: bool = False) -> str:
        """Return the status that the batch has to end with before all is answered; empty while it may go on."""
        if await asyncio.to_thread(self._means.batches.is_cancelled, self._batch):
            return "cancelled"
        if time.time() >= self._order.expires_at:
            return "expired"
        if counts_bytes and await asyncio.to_thread(self._means.files.room, self._batch.owner) < 0:
            return self._fails("file_quota_exceeded", FULL)
        return ""

    async def _send_all(self, lines: InputLines, waiting: Iterator[int], writer: Writer) -> None:
        for number in waiting:
            line = lines.read(number)
            exchange = await self._exchange(number, line)
            row_id = "batch_req_" + hashlib.sha256(f"{self._batch.id}:{number}".encode()).hexdigest()[:24]
            row = answer_line(row_id, line.custom_id, exchange.status, exchange.request_id, exchange.body())
            is_failed = exchange.status >= 400
            await writer.put(number, is_failed, orjson.dumps(row))
            self._count(is_failed)

    def _count(self, is_failed: bool) -> None:
        state = self._state
        self._state = replace(state, completed=state.completed + (not is_failed), failed=state.failed + is_failed)
        self._means.metrics.batch_lines.labels("failed" if is_failed else "answered").inc()

    async def _exchange(self, number: int, line: Line) -> Exchange:
        """Return the final answer of a line. Raise KeyGone."""
        body = {**line.body, "priority": "low"}
        if line.url != UNSEEDED and body.get("seed") is None:
            body["seed"] = seed_of(self._batch.id, number)
        content = orjson.dumps(body)
        tries, faults = 0, 0
        while True:
            caller = self._means.caller(self._order.key)
            if caller is None or caller.tenant != self._order.tenant:
                raise KeyGone
            exchange = Exchange(caller, line.url, content, f"{self._batch.id}:{number}:{faults}")
            async with self._means.slots:
                await self._sent(number, exchange)
            code = exchange.error_code
            faults += code in LOST
            is_busy = exchange.status in RETRIED and code not in FINAL
            if not (is_busy or code in AGAIN or (code in LOST and faults < FAULT_TRIES)):
                return exchange
            wait_s = min(MAX_WAIT_S, exchange.retry_after_s or FIRST_WAIT_S * 2 ** min(tries, 10))
            tries += 1
            await asyncio.sleep(wait_s * random.uniform(0.75, 1.25))  # noqa: S311 - spread, no secret

    async def _sent(self, number: int, exchange: Exchange) -> None:
        self._running[number] = exchange
        try:
            await exchange.run(self._means.app)
        except Exception:
            log.exception("line %d of %s failed", number, self._batch.id)
            exchange.fail()
        self._running.pop(number, None)  # those that are cancelled stay, for `_cancel_running`

    async def _cancel_running(self) -> None:
        """Cancel the requests whose answers will not be read."""
        for exchange in self._running.values():
            if exchange.request_id:
                try:
                    await self._means.cancel(exchange.request_id, self._order.tenant)
                except Exception as error:  # it runs to its end, and its answer is dropped
                    log.info("request %s is not cancelled: %s", exchange.request_id, error)

    # The end

    async def _finish(self, ending: str, lines: InputLines, journal: Journal) -> None:
        """Write the output files and the last status."""
        if ending == "completed":
            self._state = self._state.moved("finalizing", time.time())
            await self._write()
        last = await asyncio.to_thread(self._publish, ending, lines, journal)
        log.info("batch %s %s: %d answered, %d failed", self._batch.id, ending, last.completed, last.failed)

    def _publish(self, ending: str, lines: InputLines, journal: Journal) -> BatchState:
        """Make files of the journals and close the batch; blocks."""
        counted = rows(self._folder, self._state.sealed, self._epoch)
        if ending == "expired":
            left = [number for number in range(len(lines)) if number not in counted]
            journal.append([(number, True, self._expired(lines.read(number))) for number in left])
            counted = rows(self._folder, self._state.sealed, self._epoch)
        parts = self._folder / f".good-{self._epoch}", self._folder / f".bad-{self._epoch}"
        counts = write_outputs(self._folder, counted, parts)
        published = [
            self._published(part, name) if count else None
            for part, count, name in zip(parts, counts, ("output", "errors"), strict=True)
        ]
        last = self._state.moved(
            ending, time.time(), completed=counts[0], failed=counts[1],
            output_file_id=published[0], error_file_id=published[1],
        )  # fmt: skip
        try:
            self._means.batches.close(self._batch, last)
        except Outdated:  # else the state may name the files already
            for file_id in published:
                if file_id is not None:
                    self._means.files.delete(self._order.tenant, file_id)
            raise
        return last

    def _published(self, part: Path, name: str) -> str:
        filename = f"{self._batch.id}_{name}.jsonl"
        file_id, kept_s = new_id("file-"), self._order.output_kept_s
        self._means.files.publish(self._batch.owner, part, file_id, filename, "batch_output", kept_s)
        return file_id

    def _expired(self, line: Line) -> bytes:
        error = {"code": "batch_expired", "message": EXPIRED}
        row_id = "batch_req_" + hashlib.sha256(f"{self._batch.id}:{line.custom_id}".encode()).hexdigest()[:24]
        return orjson.dumps({"id": row_id, "custom_id": line.custom_id, "response": None, "error": error})


class Writer:
    """Write rows of many lines with one call of fsync. Behind a failure nothing more is written: a row may be cut."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._waiting: list[tuple[tuple[int, bool, bytes], asyncio.Future[None]]] = []
        self._work: asyncio.Task[None] | None = None
        self._failure: OSError | None = None

    async def put(self, number: int, is_failed: bool, line: bytes) -> None:
        """Return when the row is on the disk. Raise OSError."""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append(((number, is_failed, line), done))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._write())
        await done

    async def close(self) -> None:
        """Return when nothing is written any more."""
        if self._work is not None:
            await asyncio.wait({self._work})

    async def _write(self) -> None:
        while self._waiting:
            taken, self._waiting = self._waiting, []
            if self._failure is None:
                try:
                    await asyncio.to_thread(self._journal.append, [row for row, _ in taken])
                except OSError as error:
                    self._failure = error
            for _, done in taken:
                if done.done():
                    continue  # its sender was cancelled; the row counts
                if self._failure is None:
                    done.set_result(None)
                else:
                    done.set_exception(self._failure)
