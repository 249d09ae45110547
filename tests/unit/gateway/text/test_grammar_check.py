"""The gateway's check of grammars: tenants in turn, a bound for each, and an end for a grammar beyond all bounds."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from llguidance import LLMatcher

from services.gateway.errors import ApiError
from services.gateway.request import ARRIVAL, Arrival
from services.gateway.text.grammar import MAX_WAITING, GrammarCheck
from shared.processes.jail import JailError
from shared.text import grammar_process
from tests.support.checkpoints.tokenizers import write_model

SLOW = LLMatcher.grammar_from_json_schema({"properties": {f"p{i}": {"type": "integer"} for i in range(2250)}})
"""Takes 0.1 s until its fuel is spent."""


def simple(number: int) -> str:
    return LLMatcher.grammar_from_regex(f"a{number}")


@pytest.fixture
def check(tmp_path: Path) -> Iterator[GrammarCheck]:
    made = GrammarCheck(write_model(tmp_path / "m"), 400)
    yield made
    made.close()


async def answers(check: GrammarCheck, grammars: list[tuple[str, str]]) -> list[tuple[str, int]]:
    """Send (tenant, grammar) at once; return tenants and statuses in the order of the answers."""
    found = []

    async def one(tenant: str, grammar: str) -> None:
        try:
            await check.check("guided_regex", grammar, tenant)
        except ApiError as error:
            found.append((tenant, error.status))
        else:
            found.append((tenant, 200))

    await asyncio.gather(*(one(tenant, grammar) for tenant, grammar in grammars))
    return found


async def test_tenants_grammars_are_compiled_in_turn(check: GrammarCheck) -> None:
    sent = [("a", simple(at)) for at in range(10)] + [("b", simple(at)) for at in range(20, 23)]
    order = [tenant for tenant, _ in await answers(check, sent)]
    assert order == ["a", "b", "a", "b", "a", "b"] + 7 * ["a"]


async def test_only_the_tenant_with_too_many_grammars_is_refused(check: GrammarCheck) -> None:
    sent = [("a", simple(at)) for at in range(MAX_WAITING + 3)] + [("b", simple(at)) for at in range(50, 54)]
    statuses = await answers(check, sent)
    assert sorted(status for tenant, status in statuses if tenant == "a") == [200] * MAX_WAITING + [503] * 3
    assert [status for tenant, status in statuses if tenant == "b"] == [200] * 4


async def test_requests_with_the_same_grammar_wait_for_one_verdict(
    check: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(check.process, "check", asked.append)
    assert await answers(check, [("a", simple(0))] * (4 * MAX_WAITING)) == [("a", 200)] * (4 * MAX_WAITING)
    assert asked == [simple(0)]


async def test_request_waits_for_its_grammar_until_its_deadline(
    check: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    monkeypatch.setattr(check.process, "check", lambda _: go.wait(300))

    async def ask(may_exist: bool) -> None:
        one = Arrival("a", False, "normal", 0, 0, time.monotonic(), deadline_ms=20, may_exist=may_exist)
        ARRIVAL.set(one)
        await check.check("guided_regex", simple(0), "a")

    named = asyncio.create_task(ask(may_exist=True))
    async with asyncio.timeout(30):
        with pytest.raises(ApiError) as late:
            await asyncio.create_task(ask(may_exist=False))
        assert (late.value.status, late.value.code) == (429, "deadline_unreachable")
        assert not named.done(), "a request that may exist goes on"
        go.set()
        await named


@pytest.mark.parametrize(
    ("number", "status"), [(0, 503), (signal.SIGKILL, 503), (signal.SIGPROF, 400), (signal.SIGABRT, 400)]
)
async def test_fault_of_the_machine_is_not_the_grammars(
    check: GrammarCheck, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    def fails(_: bytes) -> bytes:
        raise JailError("died", number)

    reasons: list[str] = []
    check.on_refused = reasons.append
    monkeypatch.setattr(check.process.jail, "ask", fails)
    assert await answers(check, [("a", simple(0))]) == [("a", status)]
    assert reasons == ["busy" if status == 503 else "ended"]


async def test_grammar_beyond_its_processor_time_is_refused_and_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_process, "QUESTION_S", 0.001)
    monkeypatch.setattr(grammar_process, "PATIENCE", 120_000)  # so that processor time alone ends it
    check = GrammarCheck(write_model(tmp_path / "m"), 400)
    for ended in (1, 2):
        with pytest.raises(
            ApiError, match=r"guided_json cannot be used: it takes more than 0\.001 s of processor"
        ) as at:
            await check.check("guided_json", SLOW, "a")
        assert (at.value.status, check.process.end_count) == (400, ended)
    check.close()


async def test_verdict_is_kept_for_a_grammar_that_comes_again(check: GrammarCheck) -> None:
    bad = LLMatcher.grammar_from_regex("(a")
    first = await answers(check, [("a", simple(0)), ("a", bad)])
    check.close()
    assert await answers(check, [("b", simple(0)), ("b", bad)]) == [("b", status) for _, status in first]
    assert check.process.jail.pid is None


async def test_process_that_cannot_be_started_refuses_one_request_for_now(
    check: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr("shared.processes.jail.subprocess.Popen", fails)
        assert await answers(check, [("a", simple(0))]) == [("a", 503)]
    assert await answers(check, [("a", simple(0))]) == [("a", 200)]
