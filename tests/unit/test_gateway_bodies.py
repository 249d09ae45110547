"""What a bad body may cost: the checks give up early, as every fault found is work that the event loop waits for."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from services.gateway.api_types import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

MANY = 50_000
MESSAGE = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatBody, {"model": "m", "messages": [0] * MANY}),
        (ChatBody, {"model": "m", "messages": [{**MESSAGE, "content": [{}] * MANY}]}),
        (ChatBody, {"model": "m", "messages": [{**MESSAGE, "content": [{"type": "text", "text": ""}] * MANY}]}),
        (ChatBody, {"model": "m", "messages": [MESSAGE], "tools": [0] * MANY}),
        (CompletionBody, {"model": "m", "prompt": "x", "stop": [0] * MANY}),
        (CompletionBody, {"model": "m", "prompt": "x", "stop_token_ids": ["x"] * MANY}),
        (CompletionBody, {"model": "m", "prompt": "x", "guided_choice": [0] * MANY}),
        (TokenizeBody, {"messages": [0] * MANY}),
        (DetokenizeBody, {"tokens": ["x"] * MANY}),
    ],
    ids=["messages", "parts", "empty parts", "tools", "stops", "stop ids", "choices", "to tokenize", "to detokenize"],
)
def test_a_long_list_of_wrong_things_is_given_up_at_once(kind: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() <= 200
