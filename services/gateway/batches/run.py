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
from typing import Any

import orjson
from starlette.types import ASGIApp

from services.gateway.auth import Caller
from services.gateway.batches.files import FileStore, new_id
from services.gateway.batches.handler import Exchange
from services.gateway.batches.journal import Journal, Row, rows, write_outputs
from services.gateway.batches.lines import InputLines, seed_of
from services.gateway.batches.records import BatchOrder, BatchState, BatchStore, OpenBatch, Outdated
from services.gateway.batches.usage import Usage, usage_of
from services.gateway.errors import TAKEN_OVER, UNAVAILABLE, ApiError
from services.gateway.metrics import Metrics
from shared.batch_lines import RETRIED, LineError, answer_line
from shared.tasks import end

log = logging.getLogger("orcinus.gateway")

WATCH_S = 1.0
"""Interval at which a run looks for a cancel and for the end of its window, and writes its counts."""
FIRST_WAIT_S, MAX_WAIT_S = 0.25, 30.0
GIVE_UP_S = 3600.0
"""Time behind the end of its window in which the answers of a batch may still become files."""
FAULT_TRIES = 3
"""Times that a line is computed if Redis loses its request."""
LOST = frozenset({"record_lost", "request_not_found", "idempotency_key_reused", "record_version"})
"""Errors behind which the line is computed again, under another name; the last two where another version named it."""
AGAIN = frozenset({TAKEN_OVER, UNAVAILABLE})
"""Errors behind which the same request can be read, or may be sent once its model is back."""
FINAL = frozenset({"deadline_unreachable", "slo_unreachable"})
"""Refusals that a line brings on itself."""
EXPIRED = "the completion window ended before this request ran; send it in another batch, or with a longer window"
BROKEN = "internal error; see the log of the gateway"
GONE = "the key that created the batch is revoked or expired; create the batch with another key"
FULL = "files and batches have used up their quota of bytes; delete files, then send what has no answer again"
ROOM_ROUNDS = 10
"""Looks between two of which the bytes of the tenant are counted."""
UNSEEDED = "/v1/embeddings"
"""Requests of this endpoint take no seed."""


class KeyGone(Exception):  # noqa: N818 - an event, not an error
    """The key of the batch is revoked or expired."""


@dataclass(frozen=True, slots=True)
class Means:
    """What all runs of a gateway share."""

    app: ASGIApp
    files: FileStore
    batches: BatchStore
    caller: Callable[[str], Caller | None]  # of the key with this id; raises ApiError for one that is revoked
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
        self._exchanges: dict[int, Exchange] = {}
        self._state_write: asyncio.Future[None] | None = None  # the last write of the state

    async def run(self) -> None:
        """Run to the end of the batch. Raise Outdated; before the end of its window also OSError and others."""
        try:
            await self._run()
        except Outdated:
            raise
        except Exception:
            if time.time() < self._order.expires_at:
                raise
            log.exception("batch %s ends with what it has; its window is over", self._batch.id)
            await self._wait_written()
            await self._means.files.in_thread(self._give_up)

    async def _run(self) -> None:
        batches = self._means.batches
        with (
            closing(await self._means.files.in_thread(self._begin)) as journal,
            closing(await self._means.files.in_thread(self._input)) as lines,
        ):
            if await self._must_end() == "cancelled":
                await self._finish("cancelled", lines, journal)
                return
            problems = await self._means.files.in_thread(lines.check, self._order.endpoint, self._means.most_line_bytes)
            if problems:
                failed = self._state.move("failed", time.time(), errors=problems)
                await self._means.files.in_thread(batches.close, self._batch, failed)
                return
            counted_rows = await self._means.files.in_thread(rows, self._folder, self._state.sealed, self._epoch)
            bad = sum(row.is_failed for row in counted_rows.values())
            usage = _total(counted_rows)
            self._state = replace(
                self._state, total=len(lines), completed=len(counted_rows) - bad, failed=bad, usage=usage
            )
            if self._state.status == "validating":
                self._state = self._state.move("in_progress", time.time())
            await self._write()
            todo = [number for number in await self._means.files.in_thread(lines.order) if number not in counted_rows]
            writer = Writer(self._means.files, journal)
            ending = await self._answer(lines, todo, writer)
            await self._finish(ending, lines, journal)

    def _input(self) -> InputLines:
        return InputLines(self._folder / "input")

    def _begin(self) -> Journal:
        self._state = self._means.batches.take_over(self._batch, self._epoch)
        return Journal(self._folder, self._epoch)

    async def _write(self) -> None:
        """Write the state to the disk, behind a write that its task was cancelled at: it would land later."""
        await self._wait_written()
        files, batches = self._means.files, self._means.batches
        self._state_write = asyncio.ensure_future(files.in_thread(batches.write, self._batch, self._state))
        await asyncio.shield(self._state_write)

    async def _wait_written(self) -> None:
        """Return when no thread writes the state."""
        if self._state_write is not None:
            await asyncio.wait([self._state_write])

    # Lines

    async def _answer(self, lines: InputLines, todo: list[int], writer: Writer) -> str:
        """Answer lines until all are, or the batch has to end; return the status that it ends with."""
        if todo and (end_status := await self._must_end()):
            return end_status
        send_task = asyncio.create_task(self._send(lines, todo, writer))
        watch_task = asyncio.create_task(self._watch())
        end_status = "completed"
        try:
            await asyncio.wait({send_task, watch_task}, return_when=asyncio.FIRST_COMPLETED)
            if watch_task.done():
                end_status = watch_task.result()
            else:
                send_task.result()
        except KeyGone:
            end_status = self._fails("invalid_api_key", GONE)
        finally:
            await end(send_task, watch_task)
            await writer.close()
        if end_status != "completed":
            await self._cancel_running()
        return end_status

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
        written_state, rounds = self._state, 0
        while not (end_status := await self._must_end(counts_bytes=rounds % ROOM_ROUNDS == 0)):
            if self._state != written_state:
                written_state = self._state
                await self._write()
            await asyncio.sleep(WATCH_S)
            rounds += 1
        return end_status

    async def _must_end(self, counts_bytes: bool = False) -> str:
        """Return the status that the batch has to end with before all is answered; empty while it may go on."""
        if await self._means.files.in_thread(self._means.batches.is_cancelled, self._batch):
            return "cancelled"
        if time.time() >= self._order.expires_at:
            return "expired"
        if counts_bytes and await self._means.files.in_thread(self._means.files.room, self._batch.owner) < 0:
            return self._fails("file_quota_exceeded", FULL)
        return ""

    async def _send_all(self, lines: InputLines, numbers: Iterator[int], writer: Writer) -> None:
        for number in numbers:
            is_failed, row, usage = await self._row(lines, number)
            await writer.put(number, is_failed, row)
            self._count(is_failed, usage)

    async def _row(self, lines: InputLines, number: int) -> tuple[bool, bytes, Usage]:
        """Return whether the request of a line failed, its output line and its tokens. Raise KeyGone, OSError."""
        try:
            exchange = await self._exchange(lines, number)
            row = answer_line(
                self._row_id(number), exchange.custom_id, exchange.status, exchange.request_id, exchange.body()
            )
            return exchange.status >= 400, orjson.dumps(row), usage_of(row)
        except (KeyGone, OSError):
            raise
        except Exception:
            log.exception("line %d of %s has no answer", number, self._batch.id)
            text = await self._means.files.in_thread(self._error_line, lines, number, "internal_error", BROKEN)
            return True, text, Usage()

    def _row_id(self, number: int) -> str:
        return "batch_req_" + hashlib.sha256(f"{self._batch.id}:{number}".encode()).hexdigest()[:24]

    def _error_line(self, lines: InputLines, number: int, code: str, message: str) -> bytes:
        """Return the output line of a request without an answer; blocks."""
        try:
            custom_id = lines.read(number).custom_id
        except LineError:  # the file has changed
            custom_id = ""
        error = {"code": code, "message": message}
        return orjson.dumps({"id": self._row_id(number), "custom_id": custom_id, "response": None, "error": error})

    def _count(self, is_failed: bool, usage: Usage) -> None:
        state = self._state
        completed, failed = state.completed + (not is_failed), state.failed + is_failed
        self._state = replace(state, completed=completed, failed=failed, usage=state.usage + usage)
        self._means.metrics.batch_lines.labels("failed" if is_failed else "answered").inc()

    async def _exchange(self, lines: InputLines, number: int) -> Exchange:
        """Return the final answer of a line. Raise KeyGone, LineError.

        A line is in memory only with a slot: not while it waits for one, or to be sent again.
        """
        tries, faults = 0, 0
        while True:
            async with self._means.slots:
                caller = self._caller()
                exchange = None if caller is None else await self._send_once(caller, lines, number, faults)
            if exchange is None:
                await asyncio.sleep(WATCH_S)
                continue
            code = exchange.error_code
            faults += code in LOST
            is_busy = exchange.status in RETRIED and code not in FINAL
            if not (is_busy or code in AGAIN or (code in LOST and faults < FAULT_TRIES)):
                return exchange
            wait_s = min(MAX_WAIT_S, exchange.retry_after_s or FIRST_WAIT_S * 2 ** min(tries, 10))
            tries += 1
            del exchange
            await asyncio.sleep(wait_s * random.uniform(0.75, 1.25))  # noqa: S311 - spread, no secret

    def _caller(self) -> Caller | None:
        """Return the caller that pays; None while its key is not there: it may come back. Raise KeyGone."""
        try:
            caller = self._means.caller(self._order.key)
        except ApiError as error:
            raise KeyGone from error
        if caller is not None and caller.tenant != self._order.tenant:
            raise KeyGone
        return caller

    async def _send_once(self, caller: Caller, lines: InputLines, number: int, faults: int) -> Exchange:
        """Send a line once; return its answer. Raise LineError."""
        line = await self._means.files.in_thread(lines.read, number)
        body = {**line.body, "priority": "low"}
        if line.url != UNSEEDED and body.get("seed") is None:
            body["seed"] = seed_of(self._batch.id, number)
        exchange = Exchange(caller, line.url, orjson.dumps(body), f"{self._batch.id}:{number}:{faults}", line.custom_id)
        self._exchanges[number] = exchange
        try:
            await exchange.run(self._means.app)
        except Exception:
            log.exception("line %d of %s failed", number, self._batch.id)
            exchange.fail()
        self._exchanges.pop(number, None)  # those that are cancelled stay, for `_cancel_running`
        return exchange

    async def _cancel_running(self) -> None:
        """Cancel the requests that still run: their answers are not read."""
        for exchange in self._exchanges.values():
            if exchange.request_id:
                try:
                    await self._means.cancel(exchange.request_id, self._order.tenant)
                except Exception as error:  # it runs to its end, and its answer is dropped
                    log.info("request %s is not cancelled: %s", exchange.request_id, error)

    # The end

    async def _finish(self, status: str, lines: InputLines, journal: Journal) -> None:
        """Write the output files and the last status.

        Their ids are on the disk first, so that an epoch that has to do this again writes the same files.
        """
        self._choose_outputs()
        if status == "completed":
            self._state = self._state.move("finalizing", time.time())
        await self._write()
        if status == "expired":
            await self._means.files.in_thread(self._expire, lines, journal)
        last = await self._means.files.in_thread(self._publish, status)
        log.info("batch %s %s: %d answered, %d failed", self._batch.id, status, last.completed, last.failed)

    def _choose_outputs(self) -> None:
        if not self._state.outputs:
            self._state = replace(self._state, outputs=[new_id("file-"), new_id("file-")])

    def _expire(self, lines: InputLines, journal: Journal) -> None:
        """Write an error line for each line without an answer; blocks."""
        counted = rows(self._folder, self._state.sealed, self._epoch)
        left = [number for number in range(len(lines)) if number not in counted]
        journal.append([(number, True, self._error_line(lines, number, "batch_expired", EXPIRED)) for number in left])

    def _give_up(self) -> None:
        """End a batch that cannot be ended as it should: with the answers that it has, or at last without; blocks."""
        try:
            self._choose_outputs()
            self._means.batches.write(self._batch, self._state)
            self._publish("expired")
        except Outdated:
            raise
        except Exception:
            if time.time() < self._order.expires_at + GIVE_UP_S:
                raise
            ending = self._fails("internal_error", BROKEN)
            self._means.batches.close(self._batch, self._state.move(ending, time.time()))

    def _publish(self, status: str) -> BatchState:
        """Make files of the journals and close the batch; blocks."""
        counted_rows = rows(self._folder, self._state.sealed, self._epoch)
        parts = self._folder / f".good-{self._epoch}", self._folder / f".bad-{self._epoch}"
        for part in parts:
            part.unlink(missing_ok=True)
        *counts, expired_count = write_outputs(self._folder, counted_rows, parts)
        ids = [file_id if count else None for file_id, count in zip(self._state.outputs, counts, strict=True)]
        last = self._state.move(
            status, time.time(), completed=counts[0], failed=counts[1], expired=expired_count,
            usage=_total(counted_rows), output_file_id=ids[0], error_file_id=ids[1],
        )  # fmt: skip

        def publish() -> None:
            for part, file_id, name in zip(parts, ids, ("output", "errors"), strict=True):
                if file_id is not None:
                    filename, kept_s = f"{self._batch.id}_{name}.jsonl", self._order.output_kept_s
                    self._means.files.publish(self._batch.owner, part, file_id, filename, "batch_output", kept_s)

        self._means.batches.close(self._batch, last, publish)
        return last


def _total(rows: dict[int, Row]) -> Usage:
    """Return the tokens of all rows."""
    return sum((row.usage for row in rows.values()), Usage())


class Writer:
    """Write rows of many lines with one call of fsync."""

    def __init__(self, files: FileStore, journal: Journal) -> None:
        self._files = files
        self._journal = journal
        self._rows: list[tuple[tuple[int, bool, bytes], asyncio.Future[None]]] = []
        self._work: asyncio.Task[None] | None = None

    async def put(self, number: int, is_failed: bool, line: bytes) -> None:
        """Return when the row is on the disk. Raise OSError."""
        future = asyncio.get_running_loop().create_future()
        self._rows.append(((number, is_failed, line), future))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._write())
        await future

    async def close(self) -> None:
        """Return when nothing is written any more."""
        if self._work is not None:
            await asyncio.wait({self._work})

    async def _write(self) -> None:
        while self._rows:
            batch, self._rows = self._rows, []
            try:
                await self._files.in_thread(self._journal.append, [row for row, _ in batch])
            except OSError as error:
                failure: OSError | None = error
            else:
                failure = None
            for _, future in batch:
                if future.done():
                    continue  # its sender was cancelled; the row counts
                if failure is None:
                    future.set_result(None)
                else:
                    future.set_exception(failure)
