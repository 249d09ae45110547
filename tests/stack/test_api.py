"""The stack as a client and Prometheus see it."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from tests.deploy import test_observability as observability
from tests.support.stack import Stack, running_stack
from tests.support.waiting import free_port, until

if TYPE_CHECKING:
    from tests.support.checkpoints.models import Reference

KEY = "sk-orcinus-test"
MODEL = {"requests": 4, "output_tokens": 24, "seed": 20261123}


@pytest.fixture(scope="module")
def stack(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(
        tmp_path_factory.mktemp("stack"), reference.path, key=KEY, dtype="float32", tool_parser="hermes",
        scheduler_metrics_port=free_port(), worker_metrics_port=free_port(), metrics_aliases="true",
       
    ) as running:  # fmt: skip
        yield running


@pytest.fixture
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key=KEY, max_retries=0)


EXTRA = {"ignore_eos": True, "return_token_ids": True}


@pytest.mark.smoke
def test_official_client_gets_the_tokens_of_transformers(
    stack: Stack, client: openai.OpenAI, reference: Reference
) -> None:
    answer = client.completions.create(
        model=stack.name, prompt=reference.prompts[0], max_tokens=24, temperature=0, extra_body=EXTRA
    )
    choice = answer.choices[0]
    assert choice.token_ids == reference.outputs[0]  # type: ignore[attr-defined]
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(reference.prompts[0]), 24)
    assert "over its Unix socket" in stack.log("scheduler") or sys.platform != "linux"


NAME, AGE = {"type": "string", "pattern": "^[a-z]{1,6}$"}, {"type": "integer", "minimum": 0, "maximum": 99}
PERSON = {
    "type": "object", "properties": {"name": NAME, "age": AGE}, "required": ["name", "age"],
    "additionalProperties": False,
}  # fmt: skip


def test_structured_output_is_equal_in_any_batch(stack: Stack) -> None:
    body = {"model": stack.name, "prompt": "a", "max_tokens": 99, "seed": 9, "guided_json": PERSON}

    async def ask(client: httpx.AsyncClient, **fields: Any) -> str:
        answer = await client.post(f"{stack.url}/v1/completions", json={**body, **fields}, timeout=120)
        return str(answer.raise_for_status().json()["choices"][0]["text"])

    async def run() -> None:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as client:
            alone = await ask(client)
            others = [ask(client, seed=seed, prompt="b" * seed) for seed in range(1, 9)]
            assert (await asyncio.gather(ask(client), *others))[0] == alone

    asyncio.run(run())


def test_services_export_the_metrics_of_the_boards(stack: Stack) -> None:
    scheduler, worker = (stack.settings[f"{name}_metrics_port"] for name in ("scheduler", "worker"))
    addresses = [f"{stack.url}/metrics", *(f"http://127.0.0.1:{port}/metrics" for port in (scheduler, worker))]

    def counted() -> dict[str, float]:
        pages = [httpx.get(address, headers=stack.headers, timeout=60).text for address in addresses]
        lines = [line for page in pages for line in page.splitlines() if not line.startswith("#")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

    before = counted()
    tokens = len(stack.complete("one two three", 8, ignore_eos=True))
    produced = "orcinus_scheduler_output_tokens_total"
    until("the scheduler has reported", lambda: counted()[produced] >= before[produced] + tokens)
    found = counted()
    series = {name.partition("{")[0] for name in found}
    queried = {name for query in observability.queries() for name in re.findall(r"\borcinus_\w+", query)}
    assert queried <= series, queried - series
    for name in ("orcinus_gateway_output_tokens_total", "orcinus_worker_sampled_tokens_total"):
        assert found[name] >= before[name] + tokens, name
    assert found["orcinus_scheduler_queue_seconds_count"] > before["orcinus_scheduler_queue_seconds_count"]
    assert found['orcinus_scheduler_redis_call_seconds_count{script="publish"}'] > 0
    assert found['orcinus_gateway_redis_call_seconds_count{script="enqueue"}'] > 0
    gauge = f'vllm:num_requests_running{{engine="0",model_name="{stack.name}"}}'
    assert found[gauge] == found["orcinus_stack_running_sequences"]
    assert "vllm:request_queue_time_seconds_count" in series, "at the scheduler"
