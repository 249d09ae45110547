"""`orcinus batch IN OUT`: send the requests of a file to a server and write the answers to another file.

Both files hold lines in OpenAI's batch format. Requests with an answer in OUT are skipped, so the same command
continues a run that was stopped or killed. An answer is written once, as one complete line. A server that is busy or
down for a while is retried; only a final answer is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import random
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shared.batch_lines import RETRIED, Line, LineError, answer_line, parse_line
from shared.errors import ConfigurationError
from shared.security import api_keys
from shared.settings import BatchSettings

FAULT_TRIES = 3
"""Number of times that a line is sent if its answer is any other status of 500 and above."""
MAX_WAIT_S = 60.0
FIRST_WAIT_S = 0.5


@dataclass(slots=True)
class Summary:
    """The result of a run. skipped: lines that OUT had before; succeeded and failed: lines of this run."""

    lines: int = 0
    skipped: int = 0
    succeeded: int = 0
    failed: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    stopped: str = ""

    @property
    def well(self) -> bool:
        return not self.failed and not self.stopped

    def text(self) -> str:
        """Return the summary as one line of text."""
        done = f"{self.succeeded} answered, {self.failed} failed, {self.skipped} skipped, in {self.seconds:.1f} s"
        return f"stopped: {self.stopped}; {done}; run the same command to continue" if self.stopped else done

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Stopped(Exception):  # noqa: N818 - an event, not an error
    """The server has not answered for the patience of the run, or refuses its key."""


def run(source: Path, target: Path, settings: BatchSettings, show: bool) -> Summary:
    """Send the requests without an answer in OUT. show: draw a progress bar on stderr.

    Raises ConfigurationError for a bad file or line before the first request is sent.
    """
    places = _places(source)
    with _lock(target) as out:
        done = _finished_ids(out, target)
        todo = [place for custom_id, place in places.items() if custom_id not in done]
        summary = Summary(lines=len(places), skipped=len(places) - len(todo))
        started = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True, markup=False, highlight=False), disable=not show) as bar:
            task = bar.add_task(target.name, total=len(places), completed=summary.skipped)
            batch = _Batch(source, target, out, settings, summary, lambda: bar.advance(task), bar.console.print)
            try:
                asyncio.run(batch.run(todo))
            except Stopped as stopped:
                summary.stopped = str(stopped)
            except KeyboardInterrupt:
                summary.stopped = "interrupted"
        summary.seconds = round(time.monotonic() - started, 3)
    return summary


class _Batch:
    """One run: `concurrency` senders that share the remaining lines."""

    def __init__(
        self,
        source: Path,
        target: Path,
        out: BinaryIO,
        settings: BatchSettings,
        summary: Summary,
        advance: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._source = source
        self._salt = str(target.resolve())
        self._out = out
        self._settings = settings
        self._summary = summary
        self._advance = advance
        self._say = say
        self._trouble = ""  # the last that was said
        self._answered_at = time.monotonic()  # time of the last answer of any line
        self._random = random.SystemRandom()

    async def run(self, todo: list[int]) -> None:
        """Send the lines that begin at the offsets `todo`. Raises Stopped if none is answered for `patience_s`, and
        for a key that is refused.
        """
        key = self._settings.api_key
        headers = {"Authorization": f"Bearer {key.get_secret_value()}"} if key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        with self._source.open("rb") as lines:
            waiting = (_line_at(lines, place) for place in todo)
            async with httpx.AsyncClient(
                base_url=self._settings.url, headers=headers, timeout=self._settings.timeout_s, limits=limits
            ) as client:
                try:
                    async with asyncio.TaskGroup() as group:
                        for _ in range(min(self._settings.concurrency, len(todo))):
                            group.create_task(self._send_all(client, waiting))
                except ExceptionGroup as failed:
                    raise failed.exceptions[0] from None

    async def _send_all(self, client: httpx.AsyncClient, waiting: Iterator[Line]) -> None:
        for line in waiting:
            written = await self._answer(client, line)
            self._out.write(orjson.dumps(written) + b"\n")
            self._out.flush()
            self._advance()

    async def _answer(self, client: httpx.AsyncClient, line: Line) -> dict[str, Any]:
        """Return the output line of one request; repeat the request as long as its answer is not final.

        Raises Stopped.
        """
        body = dict(line.body)
        if self._settings.priority != "none":
            body.setdefault("priority", self._settings.priority)
        content = orjson.dumps(body)
        tries, faults, trouble = 0, 0, ""
        while True:
            headers = {"Content-Type": "application/json", "Idempotency-Key": self._name(line, content, faults)}
            wait_s = min(MAX_WAIT_S, FIRST_WAIT_S * 2 ** min(tries, 10))
            try:
                answer = await client.post(line.url, content=content, headers=headers)
            except httpx.TransportError as error:
                trouble = f"{type(error).__name__} {error}".strip()
            else:
                if answer.status_code == 401:  # of every line
                    raise Stopped(api_keys.describe_refusal(_message(answer), bool(self._settings.api_key)))
                faults += answer.status_code >= 500 and answer.status_code not in RETRIED
                if answer.status_code not in RETRIED and (answer.status_code < 500 or faults == FAULT_TRIES):
                    return self._output(line, answer)
                trouble = f"status {answer.status_code}: {_message(answer)}"
                wait_s = _retry_after_s(answer) or wait_s
            self._report(trouble)
            if time.monotonic() - self._answered_at > self._settings.patience_s:
                raise Stopped(f"no line was answered for {self._settings.patience_s:g} s; the last problem: {trouble}")
            tries += 1
            self._summary.retries += 1
            await asyncio.sleep(wait_s * self._random.uniform(0.75, 1.25))

    def _report(self, trouble: str) -> None:
        """Say why lines are sent again, where that is new."""
        if trouble != self._trouble:
            self._trouble = trouble
            patience = f"lines are sent again until none was answered for {self._settings.patience_s:g} s"
            self._say(f"{self._settings.url}: {trouble}; {patience}")

    def _name(self, line: Line, content: bytes, faults: int) -> str:
        """Return the idempotency key of a line.

        It is the same in a run that continues this one, so the line is computed once. After a fault it changes, because
        the server would repeat the fault as its answer.
        """
        parts = (self._salt.encode(), line.custom_id.encode(), line.url.encode(), content, str(faults).encode())
        return "batch-" + hashlib.sha256(b"\0".join(parts)).hexdigest()[:40]

    def _output(self, line: Line, answer: httpx.Response) -> dict[str, Any]:
        """Count a final answer and return its output line."""
        self._answered_at = time.monotonic()
        body = _json(answer)
        if answer.is_success:
            self._summary.succeeded += 1
            self._count(body)
        else:
            self._summary.failed += 1
        row_id, request_id = f"batch_req_{secrets.token_hex(12)}", answer.headers.get("x-request-id", "")
        return answer_line(row_id, line.custom_id, answer.status_code, request_id, body)

    def _count(self, body: Any) -> None:
        usage = body.get("usage") if isinstance(body, dict) else None
        if usage:
            self._summary.prompt_tokens += usage.get("prompt_tokens", usage.get("input_tokens", 0))
            self._summary.completion_tokens += usage.get("completion_tokens", usage.get("output_tokens", 0))


def _places(source: Path) -> dict[str, int]:
    """Return the offset of each line by custom_id. Raises ConfigurationError that names the first bad line."""
    places: dict[str, int] = {}
    try:
        with source.open("rb") as lines:
            number, place = 0, 0
            for number, text in enumerate(lines, 1):
                if text.strip():
                    line = _parse(text, f"{source}:{number}")
                    if line.custom_id in places:
                        raise ConfigurationError(
                            f"{source}:{number}: custom_id {line.custom_id!r} occurs twice; make it unique"
                        )
                    places[line.custom_id] = place
                place += len(text)
    except OSError as error:
        raise ConfigurationError(f"{source}: cannot be read: {error.strerror}; give a readable file") from error
    return places


def _line_at(lines: BinaryIO, place: int) -> Line:
    lines.seek(place)
    return _parse(lines.readline(), f"{lines.name} at {place}")


def _parse(text: bytes, where: str) -> Line:
    try:
        return parse_line(text)
    except LineError as error:
        raise ConfigurationError(f"{where}: {error}") from None


@contextlib.contextmanager
def _lock(target: Path) -> Iterator[BinaryIO]:
    """Yield OUT, open for reading and appending, under an exclusive lock. Raises ConfigurationError."""
    try:
        out = target.open("a+b")
    except OSError as error:
        raise ConfigurationError(f"{target}: cannot be written: {error.strerror}; give a writable file") from error
    with out:
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigurationError(
                f"{target}: another run writes it; wait for its end or name another file"
            ) from None
        yield out


def _finished_ids(out: BinaryIO, target: Path) -> set[str]:
    """Return the custom_ids in OUT, and cut off an incomplete last line, which a kill left."""
    done, complete_bytes = set(), 0
    out.seek(0)
    for number, text in enumerate(out, 1):
        if not text.endswith(b"\n"):
            break
        try:
            done.add(orjson.loads(text)["custom_id"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise ConfigurationError(f"{target}:{number}: not a line of a batch; name another file") from None
        complete_bytes += len(text)
    out.truncate(complete_bytes)
    return done


def _retry_after_s(answer: httpx.Response) -> float:
    """Return the seconds in Retry-After, at most MAX_WAIT_S; 0 if there are none."""
    text = answer.headers.get("retry-after", "")
    return min(MAX_WAIT_S, float(text)) if text.replace(".", "", 1).isdecimal() else 0.0


def _json(answer: httpx.Response) -> Any:
    try:
        return orjson.loads(answer.content)
    except orjson.JSONDecodeError:
        return {"error": {"message": answer.text[:1000], "type": "invalid_answer", "param": None, "code": None}}


def _message(answer: httpx.Response) -> str:
    body = _json(answer)
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message") if isinstance(error, dict) else error)[:300]
