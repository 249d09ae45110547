"""The order in which requests leave the gateway's backlog for Redis, and which of them may wait in it."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from services.gateway import request as module
from services.gateway.delivery.dispatcher import Entry
from services.gateway.request import Backlog
from shared.keys import CLASSES


def entry(name: str, priority: str = "normal", tenant: str = "t", **changes: Any) -> Entry:
    fields: dict[str, Any] = {
        "request_id": name, "tenant": tenant, "priority": CLASSES.index(priority), "size_bytes": 1000,
        "survives": False, "is_named": False, "expires_at": math.inf, "keys": [], "arguments": lambda _: [],
        "answer": asyncio.Future(loop=asyncio.new_event_loop()),
    }  # fmt: skip
    return Entry(**fields | changes)


def filled(*entries: Entry, **bounds: int) -> Backlog[Entry]:
    waiting: Backlog[Entry] = Backlog(**bounds)
    for one in entries:
        waiting.put(one)
    return waiting


def taken(waiting: Backlog[Entry], now: float = 0.0) -> str:
    return " ".join(one.request_id for one in waiting.take(now)[0])


def test_backlog_gives_better_classes_first() -> None:
    waiting = filled(entry("a", "low"), entry("b"), entry("c", "realtime"), entry("d", "high"), entry("e", "realtime"))
    assert taken(waiting) == "c e d b a"
    assert len(waiting) == 0


@pytest.mark.parametrize(("a_call", "calls"), [(99, ["a0 b0 a1 b1 a2 a3"]), (1, ["a0", "b0", "a1", "b1", "a2", "a3"])])
def test_backlog_gives_tenants_of_a_class_turns(a_call: int, calls: list[str]) -> None:
    waiting = filled(*(entry(name, tenant=name[0]) for name in ("a0", "a1", "a2", "a3", "b0", "b1")), a_call=a_call)
    assert [taken(waiting) for _ in calls] == calls


def test_call_is_bounded_in_requests_and_bytes() -> None:
    many = filled(*(entry(str(number), size_bytes=10) for number in range(module.BATCH_REQUESTS + 1)))
    assert [len(many.take(0.0)[0]) for _ in range(3)] == [module.BATCH_REQUESTS, 1, 0]
    big = module.BATCH_BYTES
    waiting = filled(entry("a", size_bytes=2 * big), entry("b", size_bytes=big - 10), entry("c", size_bytes=11))
    assert [taken(waiting) for _ in range(3)] == ["a", "b", "c"]


def test_tenant_may_hold_its_share_of_the_bytes() -> None:
    waiting = filled(entry("a", tenant="a", size_bytes=module.BACKLOG_BYTES // 4))
    assert waiting.full("a", 0.8, 0.5, module.BACKLOG_BYTES // 4)
    assert waiting.full("b", 0.8, 0.5, module.BACKLOG_BYTES // 4) is None
    waiting.take(0.0)
    assert waiting.full("a", 0.8, 0.5, module.BACKLOG_BYTES // 4) is None


def test_dropped_request_counts_no_more_behind_better_classes() -> None:
    one, other = entry("a", "low"), entry("b", "low")
    waiting = filled(one, other, entry("c"), requests=4)
    assert waiting.full("u", 0.75, 1.0, 1)
    waiting.drop(one)
    waiting.drop(one)
    assert waiting.full("u", 0.75, 1.0, 1) is None
    assert (len(waiting), taken(waiting)) == (2, "c b")
    waiting.drop(other)
    assert len(waiting) == 0


def test_request_past_its_deadline_is_not_enqueued() -> None:
    waiting = filled(entry("a", expires_at=5.0), entry("b", expires_at=5.1), entry("c"))
    batch, late = waiting.take(5.0)
    assert ([one.request_id for one in batch], [one.request_id for one in late]) == (["b", "c"], ["a"])
    assert [one.left_ms(5.0) for one in batch] == [99, 0]


def test_request_without_its_client_is_enqueued_only_if_it_survives() -> None:
    gone, kept = entry("gone"), entry("kept", survives=True)
    for one in (gone, kept):
        one.answer.cancel()
    assert taken(filled(gone, kept)) == "kept"


def test_backlog_leaves_room_for_better_classes_and_other_tenants() -> None:
    waiting = filled(*(entry(str(number)) for number in range(5)), requests=10)
    assert waiting.full("u", 0.5, 0.5, 1), "low: half of it"
    assert waiting.full("u", 1.0, 0.5, 1) is None
    assert waiting.full("t", 1.0, 0.5, 1), "the tenant has half"
    assert waiting.full("t", 1.0, 1.0, 1) is None, "there are no others"


def test_backlog_is_bounded_in_bytes_beyond_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKLOG_BYTES", 1000)
    assert filled().full("t", 0.5, 1.0, 5000) is None
    assert filled(entry("a")).full("t", 1.0, 1.0, 1)
    assert filled(entry("a", size_bytes=400)).full("t", 0.5, 1.0, 100) is None


def test_wait_for_room_follows_the_measured_rate() -> None:
    waiting = filled(*(entry(str(number)) for number in range(79)), entry("a", tenant="a"), requests=100)
    assert waiting.full("u", 0.5, 1.0, 1) == (False, "requests", 80, 50, 1.0), "nothing is measured"
    waiting.note_departures(10, 1.0)
    assert waiting.full("u", 0.5, 1.0, 1) == (False, "requests", 80, 50, 3.1)
    assert waiting.full("t", 1.0, 0.5, 1) == (True, "requests", 79, 50, 6.0), "two tenants take turns"


def test_wait_for_bytes_is_that_of_their_share_of_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKLOG_BYTES", 1000)
    waiting = filled(*(entry(str(number), size_bytes=100) for number in range(9)))
    waiting.note_departures(10, 1.0)
    assert waiting.full("u", 1.0, 1.0, 350) == (False, "bytes", 900, 1000, pytest.approx(0.3))
    assert waiting.full("t", 1.0, 0.9, 100) == (True, "bytes", 900, 900, pytest.approx(0.1))
