"""Health that tells which service stands still, and a Redis that is nearly full, on a whole stack."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from tests.support.gateway_process import GatewayProcess
from tests.support.models import Reference
from tests.support.stack import Stack, running_stack
from tests.support.waiting import until

CONTEXT = 16384
LONG = 2500  # tokens; the reference says what the first 64 are
FILLER = "filler:"
MODEL = {"requests": 3, "output_tokens": 64, "max_position_embeddings": CONTEXT, "seed": 20261206}


@pytest.fixture(scope="module")
def stack(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("stack")
    with running_stack(directory, reference.path, dtype="float32", max_seqs=8, threads=1) as running:
        yield running


@pytest.fixture(scope="module")
def other(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A second gateway over the same Redis, quick to say that work stands still."""
    directory = tmp_path_factory.mktemp("gateway")
    process = GatewayProcess(directory, stack.model, stack.redis.url, progress_timeout_s=2).start()
    try:
        yield process.wait_ready()
    finally:
        process.stop()


def body(stack: Stack, prompt: list[int], **fields: Any) -> dict[str, Any]:
    exact = {"model": stack.name, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    return {**exact, "prompt": prompt, "max_tokens": LONG, **fields}


def begin(stack: Stack, url: str, prompt: list[int]) -> str:
    def accepted() -> httpx.Response | None:  # a lease may have run out on a busy machine: 503 says come again
        answer = httpx.post(f"{url}/v1/completions", json=body(stack, prompt, background=True), timeout=60)
        assert answer.status_code in (202, 503), answer.text
        return answer if answer.status_code == 202 else None

    return str(until("the request is accepted", accepted, 60).json()["id"])


def result(url: str, request_id: str) -> dict[str, Any]:
    """Its one choice, once it has ended."""

    def ended() -> dict[str, Any] | None:
        found: dict[str, Any] = httpx.get(f"{url}/v1/requests/{request_id}", timeout=60).json()
        return found if found["status"] == "finished" else None

    found = until("the request has ended", ended, 120, every=0.1)
    choice: dict[str, Any] = found["result"]["choices"][0]
    return choice


def state(url: str, request_id: str) -> str:
    return str(httpx.get(f"{url}/v1/requests/{request_id}", timeout=60).json()["status"])


@pytest.mark.parametrize("service", ["worker", "scheduler"])
def test_stopped_service_shows_in_health_until_it_continues(
    stack: Stack, reference: Reference, other: GatewayProcess, service: str
) -> None:
    assert other.status("/health/progress") == 200
    request_id = begin(stack, other.url, reference.prompts[0])
    until("it runs", lambda: state(other.url, request_id) == "running")
    stack.signal(service, signal.SIGSTOP)
    try:
        assert "no step was answered" in until("work stands still", partial(stalled, other))
        assert other.status("/health/live") == 200
        if service == "scheduler":
            until("no scheduler leads", lambda: other.status("/health/ready") == 503)
    finally:
        stack.signal(service, signal.SIGCONT)
    choice = result(other.url, request_id)
    assert choice["token_ids"][:64] == reference.outputs[0]
    until("all is well", lambda: {other.status(f"/health/{name}") for name in ("ready", "progress")} == {200}, 60)


def stalled(gateway: GatewayProcess) -> str:
    """Return the reason of /health/progress while it answers 503, else an empty text."""
    answer = httpx.get(f"{gateway.url}/health/progress", timeout=60)
    return str(answer.json()["reason"]) if answer.status_code == 503 else ""


def used(stack: Stack) -> int:
    memory: Any = stack.redis.client.info("memory")
    return int(memory["used_memory"])


def refusals(stack: Stack) -> int:
    errors: Any = stack.redis.client.info("errorstats")
    return int(errors.get("errorstat_OOM", {"count": 0})["count"])


def test_nearly_full_redis_refuses_work_and_a_full_one_delays(stack: Stack, reference: Reference) -> None:
    client = stack.redis.client
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(stack.post, "/v1/completions", body(stack, prompt)) for prompt in reference.prompts[:2]]
        until("they run", lambda: stack.stats().get("running") == "2")
        try:
            client.set(FILLER, b"x" * (16 << 20))
            client.config_set("maxmemory", int(used(stack) / 0.8))
            refused = stack.post("/v1/completions", body(stack, [5, 6], max_tokens=1))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "redis_memory")
            assert int(refused.headers["retry-after"]) >= 1
            before = refusals(stack)
            client.config_set("maxmemory", used(stack) // 2)
            until("output is refused as well", lambda: refusals(stack) > before + 3)
        finally:
            client.delete(FILLER)
            client.config_set("maxmemory", 0)
        for answer, output in zip(answers, reference.outputs, strict=False):
            choice = answer.result(120).json()["choices"][0]
            assert (choice["token_ids"][: len(output)], len(choice["token_ids"])) == (output, LONG)
    until("the stack is ready by itself", stack.ready)
    assert stack.complete(reference.prompts[0], 8) == reference.outputs[0][:8]
    assert "wait to be adopted" not in stack.log("scheduler").rpartition("is back")[2]
