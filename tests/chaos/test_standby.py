"""A standby takes the shard of a scheduler that is killed or stopped, and the stopped one comes back to nothing."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.models import Reference, make_llama
from tests.support.stack import Stack, running_stack
from tests.support.waiting import until

STREAMS = 6
LONG = 1500
STANDBY = "scheduler-standby"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_llama(
        tmp_path_factory.mktemp("standby") / "tiny",
        requests=STREAMS,
        output_tokens=64,
        max_position_embeddings=4096,
        seed=20261202,
    )


@pytest.fixture
def stack(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack"), reference.path, dtype="float32") as running:
        running.start("scheduler", STANDBY)
        until("the standby waits", lambda: "another scheduler holds it" in running.log(STANDBY), 60)
        yield running


@pytest.fixture
def streams(stack: Stack, reference: Reference) -> Iterator[list[Future[list[int]]]]:
    """One stream a prompt, once all of them flow."""
    flowing = [threading.Event() for _ in range(STREAMS)]

    def client(index: int) -> list[int]:
        ids: list[int] = []
        asked: dict[str, Any] = {
            "model": stack.name, "prompt": reference.prompts[index], "max_tokens": LONG, "temperature": 0,
            "ignore_eos": True, "stream": True, "return_token_ids": True,
        }  # fmt: skip
        with httpx.stream("POST", f"{stack.url}/v1/completions", json=asked, timeout=120) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line.removeprefix("data: "))["choices"]:
                        ids += choice.get("token_ids") or []
                    if len(ids) > 4:
                        flowing[index].set()
        return ids

    with ThreadPoolExecutor(STREAMS) as pool:
        answers = [pool.submit(client, index) for index in range(STREAMS)]
        until("all flow", lambda: all(event.is_set() for event in flowing) or any(a.done() for a in answers), 60)
        assert not any(answer.done() for answer in answers)
        yield answers


def epoch(stack: Stack) -> int:
    return int(stack.stats()["epoch"])


def assert_nothing_is_lost(stack: Stack, reference: Reference, streams: list[Future[list[int]]]) -> None:
    got = [answer.result(120) for answer in streams]
    assert [ids[:64] for ids in got] == reference.outputs
    assert [len(ids) for ids in got] == [LONG] * STREAMS
    after = stack.settled()
    assert (after["blocks"], after["pending"]) == (after["total"], [0, 0, 0, 0])


def test_a_standby_goes_on_where_a_killed_scheduler_was(
    stack: Stack, reference: Reference, streams: list[Future[list[int]]]
) -> None:
    before = epoch(stack)
    stack.kill("scheduler")
    assert_nothing_is_lost(stack, reference, streams)
    assert epoch(stack) > before


def test_a_scheduler_that_was_stopped_comes_back_to_nothing(
    stack: Stack, reference: Reference, streams: list[Future[list[int]]]
) -> None:
    before = epoch(stack)
    stack.signal("scheduler", signal.SIGSTOP)
    until("the standby leads", lambda: epoch(stack) > before, 30)
    led = epoch(stack)
    stack.signal("scheduler", signal.SIGCONT)
    assert stack.wait("scheduler") == 1
    assert_nothing_is_lost(stack, reference, streams)
    assert epoch(stack) == led
    assert any(
        text in stack.log("scheduler")
        for text in ("another scheduler took", "another scheduler follows", "another scheduler holds")
    )
