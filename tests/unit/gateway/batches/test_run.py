"""One batch through its statuses, over a scripted application."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.auth import Caller
from services.gateway.batches import run as module
from services.gateway.batches.journal import journal_name
from services.gateway.batches.lines import InputLines, seed_of
from services.gateway.batches.records import Batch, BatchState, BatchStore, OpenBatch, Outdated
from services.gateway.batches.run import Means, Run
from services.gateway.batches.usage import Usage, usage_of
from services.gateway.errors import ApiError
from services.gateway.metrics import Metrics
from shared.batch_lines import Line
from tests.support.waiting import wait_until
from tests.unit.gateway.batches.disk import TENANT, lines_of, ordered, stores

Answer = tuple[int, Any]
GOOD: Answer = (200, {"choices": []})


def error(status: int, code: str) -> Answer:
    return status, {"error": {"message": "no", "type": "x", "param": None, "code": code}}


@dataclass
class ScriptedApp:
    """Answers with `answer(body, how often its prompt came before)`, after `gate`."""

    answer: Callable[[dict[str, Any], int], Answer] = lambda body, before: GOOD
    gate: Callable[[dict[str, Any]], Awaitable[Any]] | None = None
    code: str = ""  # of errors that have none in their body
    bodies: list[dict[str, Any]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    tenants: set[str] = field(default_factory=set)
    active: int = 0
    most: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        body = orjson.loads(await request.body())
        before = sum(known["prompt"] == body["prompt"] for known in self.bodies)
        self.bodies.append(body)
        self.names.append(request.headers["idempotency-key"])
        self.tenants.add(request.state.tenant)
        request.state.spec = Spec(f"cmpl-{int(body['prompt'])}")
        request.state.error_code = self.code
        self.active += 1
        self.most = max(self.most, self.active)
        try:
            await asyncio.sleep(0)
            if self.gate is not None:
                await self.gate(body)
            status, content = self.answer(body, before)
        finally:
            self.active -= 1
        await Response(content if isinstance(content, bytes) else orjson.dumps(content), status)(scope, receive, send)


@dataclass
class Spec:
    id: str


class Case:
    """A new batch, and gateways that run it."""

    def __init__(self, folder: Path, content: bytes, window_s: int = 3600, **settings: Any) -> None:
        self.files, self.batches = stores(folder, **settings)
        self.order, self.open = ordered(self.files, self.batches, content, window_s)
        self.app = ScriptedApp()
        self.caller: Caller | None = Caller(TENANT)
        self.is_revoked = False
        self.cancelled: list[tuple[str, str]] = []

    def run(self, epoch: int = 1, requests: int = 4, slots: int = 4) -> Run:
        async def cancel(request_id: str, tenant: str) -> None:
            self.cancelled.append((request_id, tenant))

        def caller(key: str) -> Caller | None:
            if key != "key-1" or self.is_revoked:
                raise ApiError(401, "the API key is revoked")
            return self.caller

        means = Means(
            self.app, self.files, self.batches, caller, cancel,
            asyncio.Semaphore(slots), requests, 100_000, Metrics(),
        )  # fmt: skip
        return Run(means, self.open, self.order, epoch)

    @property
    def now(self) -> Batch:
        return self.batches.find(TENANT, self.order.id)

    def rows(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        with self.files.open(TENANT, file_id)[1] as content:
            return [orjson.loads(text) for text in content]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(module, "WATCH_S", 0.005)


def counts(batch: Batch) -> tuple[str, int, int, int]:
    return batch.status, batch.state.total, batch.state.completed, batch.state.failed


async def test_each_line_is_one_request_of_class_low(tmp_path: Path) -> None:
    case = Case(tmp_path, lines_of(30))
    case.app.answer = lambda body, before: error(400, "invalid_value") if int(body["prompt"]) == 7 else GOOD
    full = asyncio.Event()

    async def gate(body: dict[str, Any]) -> None:
        if case.app.active == 4:
            full.set()
        await full.wait()

    case.app.gate = gate
    await case.run().run()
    assert counts(case.now) == ("completed", 30, 29, 1)
    assert {body["priority"] for body in case.app.bodies} == {"low"}
    seeds = {int(body["prompt"]): body["seed"] for body in case.app.bodies}
    assert seeds == {number: seed_of(case.order.id, number) for number in range(30)}
    assert (case.app.tenants, case.app.most) == ({TENANT}, 4)
    assert Counter(case.app.names) == Counter(f"{case.order.id}:{number}:0" for number in range(30))
    good, bad = case.rows(case.now.state.output_file_id), case.rows(case.now.state.error_file_id)
    assert [row["custom_id"] for row in good] == [f"line-{n}" for n in range(30) if n != 7]
    assert good[3]["response"] == {"status_code": 200, "request_id": "cmpl-3", "body": {"choices": []}}
    assert [(row["custom_id"], row["response"]["status_code"], row["error"]) for row in bad] == [("line-7", 400, None)]
    assert len({row["id"] for row in good + bad}) == 30
    times = case.now.state.times
    assert times.keys() == {"in_progress_at", "finalizing_at", "completed_at"}


async def test_seed_of_a_line_stays(tmp_path: Path) -> None:
    case = Case(tmp_path, lines_of(2, seed=5))
    await case.run().run()
    assert {body["seed"] for body in case.app.bodies} == {5}


async def test_wrong_input_fails_before_a_line_is_sent(tmp_path: Path) -> None:
    case = Case(tmp_path, lines_of(2) + lines_of(1))
    await case.run().run()
    found = case.now
    assert (found.status, found.state.output_file_id, case.app.bodies) == ("failed", None, [])
    assert [(each["code"], each["line"]) for each in found.state.errors] == [("duplicate_custom_id", 3)]
    assert found.body()["errors"]["object"] == "list"


@pytest.mark.parametrize(
    ("refusal", "times", "faults", "completed"),
    [
        (error(429, "queue_full"), 5, [0] * 6, 1),
        (error(503, "redis_unavailable"), 5, [0] * 6, 1),
        (error(409, "taken_over"), 5, [0] * 6, 1),
        (error(404, "model_unavailable"), 5, [0] * 6, 1),
        (error(503, "record_version"), 1, [0, 1], 1),
        (error(500, "record_lost"), 1, [0, 1], 1),
        (error(500, "record_lost"), 9, [0, 1, 2], 0),
        (error(429, "deadline_unreachable"), 9, [0], 0),
        (error(429, "slo_unreachable"), 9, [0], 0),
    ],
)
async def test_line_is_sent_again_under_its_name_until_it_is_lost(
    tmp_path: Path, refusal: Answer, times: int, faults: list[int], completed: int
) -> None:
    """A line that was lost, or that another version took, is another request; one that refuses itself is not sent."""
    case = Case(tmp_path, lines_of(1))
    case.app.answer = lambda body, before: refusal if before < times else GOOD
    await case.run().run()
    assert counts(case.now) == ("completed", 1, completed, 1 - completed)
    assert case.app.names == [f"{case.order.id}:0:{fault}" for fault in faults]


async def test_error_in_the_form_of_messages_is_known_by_its_code(tmp_path: Path) -> None:
    case = Case(tmp_path, lines_of(1))
    case.app.code = "deadline_unreachable"
    case.app.answer = lambda body, before: (429, {"type": "error", "error": {"type": "rate_limit_error"}})
    await case.run().run()
    assert (counts(case.now), len(case.app.bodies)) == (("completed", 1, 0, 1), 1)


def broken(body: dict[str, Any], before: int) -> Answer:
    if body["prompt"] == "001":
        raise RuntimeError("a bug")
    return 200, b"no JSON"


async def test_line_whose_handler_breaks_or_answers_no_json_is_an_error(tmp_path: Path) -> None:
    case = Case(tmp_path, lines_of(2))
    case.app.answer = broken
    await case.run().run()
    assert counts(case.now) == ("completed", 2, 0, 2)
    text, bug = case.rows(case.now.state.error_file_id)
    assert (text["custom_id"], text["response"], text["error"]["code"]) == ("line-0", None, "internal_error")
    assert (bug["response"]["status_code"], bug["response"]["body"]["error"]["code"]) == (500, "internal_error")


async def test_line_is_read_once_it_has_a_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tmp_path, lines_of(9))
    read, seen = 0, []
    original = InputLines.read

    def counted(lines: InputLines, number: int) -> Line:
        nonlocal read
        read += 1
        return original(lines, number)

    async def gate(body: dict[str, Any]) -> None:
        seen.append(read)

    monkeypatch.setattr(InputLines, "read", counted)
    case.app.gate = gate
    await case.run(requests=8, slots=1).run()
    assert seen == list(range(1, 10))


async def test_a_late_write_of_counts_is_over_before_the_batch_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write hangs while the last line is answered; a batch with that state at last would never end."""
    case = Case(tmp_path, lines_of(3))
    hangs, ended, over = asyncio.Event(), threading.Event(), threading.Event()
    loop, write = asyncio.get_running_loop(), BatchStore.write

    def slow(store: BatchStore, batch: OpenBatch, state: BatchState, first: Callable[[], None] | None = None) -> None:
        if state.status == "in_progress" and state.completed == 2:
            over.clear()
            loop.call_soon_threadsafe(hangs.set)
            ended.wait(0.2)  # it is not, unless the batch ends meanwhile
        write(store, batch, state, first)
        if state.status == "in_progress":
            over.set()
        elif state.status == "completed":
            ended.set()

    async def gate(body: dict[str, Any]) -> None:
        if body["prompt"] == "002":
            await hangs.wait()

    monkeypatch.setattr(BatchStore, "write", slow)
    case.app.gate = gate
    await case.run().run()
    assert hangs.is_set() and await asyncio.to_thread(over.wait, 10)
    assert counts(case.now) == ("completed", 3, 3, 0)


async def test_batch_cancelled_early_is_not_checked(tmp_path: Path) -> None:
    case = Case(tmp_path, b"{\n")
    case.batches.cancel(TENANT, case.order.id)
    await case.run().run()
    assert counts(case.now) == ("cancelled", 0, 0, 0)


async def test_cancelled_batch_keeps_what_was_answered(tmp_path: Path) -> None:
    case = Case(tmp_path, lines_of(9))
    waiting = 0

    async def gate(body: dict[str, Any]) -> None:
        nonlocal waiting
        if int(body["prompt"]) > 2:
            waiting += 1
            if waiting == 4:
                case.batches.cancel(TENANT, case.order.id)
            await asyncio.Event().wait()

    case.app.gate = gate
    await case.run().run()
    assert counts(case.now) == ("cancelled", 9, 3, 0)
    assert [row["custom_id"] for row in case.rows(case.now.state.output_file_id)] == ["line-0", "line-1", "line-2"]
    assert sorted(case.cancelled) == [(f"cmpl-{n}", TENANT) for n in range(3, 7)]
    assert case.now.cancelling_at is not None and "cancelled_at" in case.now.state.times


async def test_window_that_ends_leaves_error_lines(tmp_path: Path) -> None:
    case = Case(tmp_path, lines_of(3), window_s=-1)

    await case.run().run()
    assert counts(case.now) == ("expired", 3, 0, 3) and case.app.bodies == []
    assert case.now.state.expired == 3
    bad = case.rows(case.now.state.error_file_id)
    assert [(row["custom_id"], row["response"], row["error"]["code"]) for row in bad] == [
        (f"line-{n}", None, "batch_expired") for n in range(3)
    ]


async def test_revoked_key_ends_its_batch(tmp_path: Path) -> None:
    case = Case(tmp_path, lines_of(9))

    def answer(body: dict[str, Any], before: int) -> Answer:
        case.is_revoked = True
        return GOOD

    case.app.answer = answer
    await case.run(requests=1).run()
    assert counts(case.now) == ("failed", 9, 1, 0)
    assert case.now.state.errors[0]["code"] == "invalid_api_key"
    assert len(case.rows(case.now.state.output_file_id)) == 1


async def test_key_that_is_lost_may_come_back(tmp_path: Path) -> None:
    case = Case(tmp_path, lines_of(9))

    def answer(body: dict[str, Any], before: int) -> Answer:
        case.caller = None
        return GOOD

    case.app.answer = answer
    task = asyncio.create_task(case.run(requests=1).run())
    await wait_until(lambda: case.now.state.completed >= 1)
    assert len(case.app.bodies) == 1 and case.now.status == "in_progress"
    case.app.answer = lambda body, before: GOOD
    case.caller = Caller(TENANT)
    async with asyncio.timeout(20):
        await task
    assert counts(case.now) == ("completed", 9, 9, 0)


async def test_key_of_another_tenant_pays_nothing(tmp_path: Path) -> None:
    case = Case(tmp_path, lines_of(2))
    case.caller = Caller("tenant-2")
    await case.run().run()
    assert (case.now.status, case.app.bodies) == ("failed", [])


async def test_outputs_beyond_the_quota_end_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROOM_ROUNDS", 1)
    case = Case(tmp_path, lines_of(2), tenant_file_bytes=4096, file_bytes=1024)

    async def gate(body: dict[str, Any]) -> None:
        if int(body["prompt"]) == 1:
            await asyncio.Event().wait()

    case.app.gate = gate
    case.app.answer = lambda body, before: (200, {"text": "x" * 8000})
    await case.run().run()
    assert counts(case.now) == ("failed", 2, 1, 0)
    assert case.now.state.errors[0]["code"] == "file_quota_exceeded"


async def begun(case: Case) -> asyncio.Task[None]:
    """Run until five lines are on the disk, and four more are under way."""
    task = asyncio.create_task(case.run(epoch=1).run())
    await wait_until(lambda: case.now.state.completed >= 5 and case.app.active >= 4)
    return task


async def killed(case: Case) -> None:
    """Run as far as `begun`, and end there."""
    case.app.gate = stuck
    task = await begun(case)
    task.cancel()
    await asyncio.wait({task})


async def stuck(body: dict[str, Any]) -> None:
    if int(body["prompt"]) > 4:
        await asyncio.Event().wait()


async def test_next_gateway_sends_only_what_has_no_answer(tmp_path: Path) -> None:
    case = Case(tmp_path, lines_of(20))
    await killed(case)
    assert case.now.status == "in_progress" and case.cancelled == []
    first, case.app = case.app, ScriptedApp()
    await case.run(epoch=2).run()
    assert counts(case.now) == ("completed", 20, 20, 0)
    assert len(case.app.bodies) == 15
    assert set(first.names) & set(case.app.names) == {f"{case.order.id}:{number}:0" for number in range(5, 9)}
    assert [row["custom_id"] for row in case.rows(case.now.state.output_file_id)] == [f"line-{n}" for n in range(20)]


async def test_gateway_that_lost_its_lease_changes_nothing(tmp_path: Path) -> None:
    case = Case(tmp_path, lines_of(20))
    paused = asyncio.Event()

    async def gate(body: dict[str, Any]) -> None:
        if int(body["prompt"]) > 4:
            await paused.wait()

    case.app.gate = gate
    case.app.answer = lambda body, before: (200, {"by": "the slow one"})
    task = await begun(case)
    case.app = ScriptedApp()
    await case.run(epoch=2).run()
    before, files = case.now, case.files.of_tenant(TENANT)
    paused.set()
    with pytest.raises(Outdated):
        async with asyncio.timeout(20):
            await task
    assert (case.now, case.files.of_tenant(TENANT)) == (before, files)
    answered = case.rows(case.now.state.output_file_id)
    assert [row["custom_id"] for row in answered] == [f"line-{n}" for n in range(20)]
    assert sum(row["response"]["body"] == {"by": "the slow one"} for row in answered) == 5


async def test_output_that_was_published_twice_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tmp_path, lines_of(3))
    case.app.answer = lambda body, before: error(400, "invalid_value") if int(body["prompt"]) == 1 else GOOD
    publish, made = case.files.publish, 0

    def cut(*given: Any) -> Any:
        nonlocal made
        made += 1
        found = publish(*given)
        if made == 2:
            raise OSError("the disk is full")
        return found

    monkeypatch.setattr(case.files, "publish", cut)
    with pytest.raises(OSError):
        await case.run(epoch=1).run()
    assert (case.now.status, case.now.state.output_file_id) == ("finalizing", None)
    await case.run(epoch=2).run()
    assert counts(case.now) == ("completed", 3, 2, 1)
    state = case.now.state
    assert {file.id for file in case.files.of_tenant(TENANT)} == {
        case.order.input_file_id, state.output_file_id, state.error_file_id,
    }  # fmt: skip
    assert [row["custom_id"] for row in case.rows(state.output_file_id)] == ["line-0", "line-2"]


async def test_outputs_stay_when_cleaning_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tmp_path, lines_of(1))

    unlink = Path.unlink

    def broken(path: Path, missing_ok: bool = False) -> None:
        if path.name == "input":
            raise OSError("the disk is gone")
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", broken)
        with pytest.raises(OSError):
            await case.run().run()
    assert case.now.status == "completed" and len(case.rows(case.now.state.output_file_id)) == 1
    assert case.batches.find_unfinished() == [case.open]
    assert case.batches.order(case.open) is None and case.batches.find_unfinished() == []
    folder = case.batches.folder(case.open.owner, case.open.id)
    assert {path.name for path in folder.iterdir()} == {"batch.json", "state-0000000000000001.json"}


async def test_batch_that_cannot_be_read_ends_with_its_window(tmp_path: Path) -> None:
    case = Case(tmp_path, lines_of(9), window_s=60)
    await killed(case)
    folder = case.batches.folder(case.open.owner, case.open.id)
    (folder / "input").unlink()
    with pytest.raises(FileNotFoundError):
        await case.run(epoch=2).run()
    case.order = replace(case.order, expires_at=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "GIVE_UP_S", 1e12)
        await case.run(epoch=3).run()
    assert counts(case.now) == ("expired", 9, 5, 0)
    assert len(case.rows(case.now.state.output_file_id)) == 5


async def test_batch_whose_answers_are_lost_fails_after_its_window(tmp_path: Path) -> None:
    case = Case(tmp_path, lines_of(9), window_s=60)
    await killed(case)
    case.batches.take_over(case.open, 2)
    journal = case.batches.folder(case.open.owner, case.open.id) / journal_name(1)
    journal.unlink()
    journal.symlink_to("nothing")  # is opened by no gateway
    case.order = replace(case.order, expires_at=0)
    await case.run(epoch=3).run()
    assert (case.now.status, case.now.state.errors[0]["code"]) == ("failed", "internal_error")


def answer_with(prompt: int, output: int) -> Answer:
    details = {"prompt_tokens_details": {"cached_tokens": 2}, "completion_tokens_details": {"reasoning_tokens": 1}}
    return 200, {"usage": {"prompt_tokens": prompt, "completion_tokens": output, **details}}


async def test_tokens_of_all_lines_are_counted_once(tmp_path: Path) -> None:
    case = Case(tmp_path, lines_of(9))
    case.app.answer = lambda body, before: answer_with(10, int(body["prompt"]))
    await killed(case)
    case.app = ScriptedApp()
    case.app.answer = lambda body, before: (
        error(400, "invalid_value") if int(body["prompt"]) == 8 else answer_with(10, int(body["prompt"]))
    )
    await case.run(epoch=2).run()
    assert counts(case.now) == ("completed", 9, 8, 1)
    assert case.now.body()["usage"] == {
        "input_tokens": 80, "input_tokens_details": {"cached_tokens": 16},
        "output_tokens": 28, "output_tokens_details": {"reasoning_tokens": 8}, "total_tokens": 108,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 3, "total_tokens": 3}, Usage(3)),
        ({"input_tokens": 3, "input_tokens_details": {"cached_tokens": 2}, "output_tokens": 4,
          "output_tokens_details": {"reasoning_tokens": 1}}, Usage(3, 2, 4, 1)),
        ({"prompt_tokens": "3", "prompt_tokens_details": None}, Usage()),
        (None, Usage()),
    ],
)  # fmt: skip
def test_usage_of_every_endpoint_is_read(usage: Any, expected: Usage) -> None:
    assert usage_of({"response": {"body": {"usage": usage}}}) == expected
