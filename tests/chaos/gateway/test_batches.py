"""A batch of many lines while its gateway and the scheduler are killed: each line is answered once, as plain.

The long run: `LINES=20000 python -m pytest --timeout 7200 tests/chaos/gateway/test_batches.py`.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from services.gateway.batches.lines import seed_of
from tests.support.checkpoints.models import Reference
from tests.support.gateway.process import GatewayProcess, running_gateway
from tests.support.stack import Stack
from tests.support.waiting import until

LINES = int(os.environ.get("LINES", "1000"))
DRAWN = 7  # each so many-th line is sampled
LONGEST = 24
MODEL = {"requests": 8, "output_tokens": LONGEST, "max_position_embeddings": 512, "seed": 20261211}
STACK = {"dtype": "float32", "max_seqs": 32}
URL = "/v1/completions"


@pytest.fixture
def other(stack: Stack, tmp_path: Path) -> Iterator[GatewayProcess]:
    """A second gateway over the same Redis and the same folder of files."""
    files = stack.directory / "files"
    with running_gateway(tmp_path, stack.model, stack.redis, files_dir=files) as process:
        yield process.wait_ready()


def body(stack: Stack, reference: Reference, number: int) -> dict[str, Any]:
    prompt = reference.prompts[number % len(reference.prompts)]
    common = {"model": stack.name, "prompt": prompt, "return_token_ids": True, "ignore_eos": True}
    temperature = 1 if number % DRAWN == 0 else 0
    return {**common, "temperature": temperature, "max_tokens": 1 + number % LONGEST}


def lines(stack: Stack, reference: Reference) -> bytes:
    made = [
        {"custom_id": f"line-{n}", "method": "POST", "url": URL, "body": body(stack, reference, n)}
        for n in range(LINES)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in made)


def retrieved(client: openai.OpenAI, batch: Batch) -> Batch | None:
    try:
        return client.batches.retrieve(batch.id)
    except openai.APIConnectionError:  # the gateway is being killed
        return None


def completed(client: openai.OpenAI, batch: Batch) -> int:
    found = retrieved(client, batch)
    return found.request_counts.completed if found is not None and found.request_counts is not None else 0


def test_each_line_is_answered_once_whatever_dies(stack: Stack, reference: Reference, other: GatewayProcess) -> None:
    with (
        openai.OpenAI(base_url=stack.url + "/v1", api_key="x", max_retries=0) as first,
        openai.OpenAI(base_url=other.url + "/v1", api_key="x", max_retries=5) as second,
    ):
        file = second.files.create(file=("in.jsonl", lines(stack, reference)), purpose="batch")
        batch = first.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")
        for share, services in ((0.1, "gateway"), (0.35, "other"), (0.6, "gateway other")):
            reached = int(share * LINES)
            until(
                f"{reached} lines are answered",
                lambda least=reached: completed(second, batch) >= least,
                240 + LINES / 20,
            )
            stack.kill("scheduler")
            if "gateway" in services:
                stack.kill("gateway")
                stack.start("gateway")
            if "other" in services:
                other.stop(signal.SIGKILL)
                other.start().wait_live()
            stack.start("scheduler")

        def ended() -> Batch | None:
            found = retrieved(second, batch)
            return found if found is not None and found.status == "completed" else None

        found = until("the batch is completed", ended, 240 + LINES / 20)
        print(found)  # with its times, for runs by hand
        assert found.output_file_id is not None and found.error_file_id is None
        answers = [json.loads(text) for text in second.files.content(found.output_file_id).text.splitlines()]
        assert [answer["custom_id"] for answer in answers] == [f"line-{n}" for n in range(LINES)]
        for number, answer in enumerate(answers):
            tokens = answer["response"]["body"]["choices"][0]["token_ids"]
            if number % DRAWN:
                assert tokens == reference.outputs[number % len(reference.outputs)][: 1 + number % LONGEST], number
        for number in range(0, LINES, 20 * DRAWN):
            plain = body(stack, reference, number) | {"seed": seed_of(batch.id, number)}
            answer = second.completions.create(
                **{name: plain.pop(name) for name in ("model", "prompt")}, extra_body=plain
            )
            assert (
                answer.choices[0].model_dump()["token_ids"]
                == answers[number]["response"]["body"]["choices"][0]["token_ids"]
            )
    until("the stack is ready", stack.ready, 60)
    stack.settled_empty()


def test_vectors_of_a_batch_are_the_plain_ones(stack: Stack, reference: Reference) -> None:
    until("the stack is ready", stack.ready, 60)
    url: Any = "/v1/embeddings"
    bodies = [{"model": stack.name, "input": prompt} for prompt in reference.prompts]
    made = [{"custom_id": f"{n}", "method": "POST", "url": url, "body": each} for n, each in enumerate(bodies)]
    with openai.OpenAI(base_url=stack.url + "/v1", api_key="x", max_retries=5) as client:
        content = "".join(json.dumps(line) + "\n" for line in made).encode()
        file = client.files.create(file=content, purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")

        def ended() -> Batch | None:
            found = client.batches.retrieve(batch.id)
            return found if found.status == "completed" else None

        found = until("the batch is completed", ended, 120)
        assert found.output_file_id is not None
        answers = [json.loads(text) for text in client.files.content(found.output_file_id).text.splitlines()]
    plain = [stack.post(url, each).json()["data"] for each in bodies]
    assert [answer["response"]["body"]["data"] for answer in answers] == plain
