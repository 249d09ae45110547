"""Thinking through the official client: chat and Responses, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.support.checkpoints.tokenizers import token_ids
from tests.support.gateway_process import GatewayProcess, led_gateway
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import STOP, answering

SAID = "<think>\nfoxes?\n</think>\n\nThe fox"
SETTINGS = {"served_model_name": "thinker", "reasoning_parser": "think"}


@pytest.fixture(scope="module")
def thinker(
    tmp_path_factory: pytest.TempPathFactory, model: Path, redis_server: RedisServer
) -> Iterator[GatewayProcess]:
    """A gateway whose model thinks before each answer."""
    directory = tmp_path_factory.mktemp("thinker")
    with (
        led_gateway(directory, model, redis_server, **SETTINGS) as (gateway, scheduler),
        answering(scheduler, lambda _: token_ids(SAID), STOP),
    ):
        yield gateway


def test_official_client_reads_thinking_apart(thinker: GatewayProcess) -> None:
    thinking, told = "", ""
    with openai.OpenAI(base_url=thinker.url + "/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(model="thinker", messages=[{"role": "user", "content": "x"}])
        message = whole.choices[0].message
        assert (message.content, message.model_extra) == ("\n\nThe fox", {"reasoning_content": "\nfoxes?\n"})
        assert whole.usage is not None and whole.usage.completion_tokens_details is not None
        marked = len(token_ids(SAID.removesuffix("\n\nThe fox")))
        assert whole.usage.completion_tokens_details.reasoning_tokens == marked
        for event in client.chat.completions.create(
            model="thinker", messages=[{"role": "user", "content": "x"}], stream=True
        ):
            delta = event.choices[0].delta
            thinking += (delta.model_extra or {}).get("reasoning_content", "")
            told += delta.content or ""
        assert (thinking, told) == ("\nfoxes?\n", "\n\nThe fox")
        response = client.responses.create(model="thinker", input="x")
        assert [item.type for item in response.output] == ["reasoning", "message"]
        assert response.output_text == "\n\nThe fox"
        with client.responses.stream(model="thinker", input="x") as stream:
            thoughts = [event.delta for event in stream if event.type == "response.reasoning_text.delta"]
            assert "".join(thoughts) == "\nfoxes?\n"
            assert [item.type for item in stream.get_final_response().output] == ["reasoning", "message"]
