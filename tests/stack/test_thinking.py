"""A budget of thinking on a whole stack: the closing mark comes behind so many tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.stack.test_retrieval import write_judge
from tests.support.stack import Stack, running_stack
from tests.unit.gateway.text.test_reasoning import OPENS

ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 1, "seed": 5}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A model with random weights. Its template opens the block of thinking, and the marks of thinking are tokens."""
    reference = write_judge(tmp_path_factory.mktemp("thinker"))
    path = reference.path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": OPENS}))
    with running_stack(tmp_path_factory.mktemp("stack"), reference.path, dtype="float32") as running:
        yield running


@pytest.fixture(scope="module")
def asked(stack: Stack) -> dict[str, Any]:
    """A request. Its answer does not end, and does not close its thinking, by itself."""
    ends = stack.post("/tokenize", {"prompt": "</think>"}).json()["tokens"]
    ends.append(257)  # eos_token_id of `write_judge`
    return ASKED | {"model": stack.name, "logit_bias": {str(token): -100 for token in ends}}


def answered(stack: Stack, **body: Any) -> tuple[str, str, int]:
    """Return thinking, content and the tokens of the thinking."""
    answer = stack.post("/v1/chat/completions", body).json()
    message = answer["choices"][0]["message"]
    thought = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    return message["reasoning_content"], message["content"] or "", thought


@pytest.mark.parametrize("budget", [1, 7])
def test_thinking_has_at_most_its_budget(stack: Stack, asked: dict[str, Any], budget: int) -> None:
    free = answered(stack, **asked, max_tokens=20)
    assert free[1:] == ("", 20)
    thinking, content, thought = answered(stack, **asked, max_tokens=20, thinking_token_budget=budget)
    assert thought == budget + 1, "with the closing mark"
    assert free[0].startswith(thinking.rstrip("\ufffd")) and content
