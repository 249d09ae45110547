"""The version of `Delivery`: a change of what a stored record tells is a change of its number."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from protos import queue_pb2
from services.gateway.delivery.stream import ChoiceText
from services.gateway.request import CHANNELS, FRAMED, THINKING, UNDECIDED, VERSION, GenerationSpec, ToolUse
from services.gateway.text.reasoning import MARKERS
from shared.columns import pack
from tests.support.generations import model, spec, stored
from tests.unit.gateway.text.test_reasoning import CALLS, HEAD, NEXT

STATES = (UNDECIDED, THINKING, FRAMED)
RECORDS: list[tuple[dict[str, Any], str]] = [
    *(
        (
            {"reasoning": state, "markers": list(marks)},
            f" {marks[0]}a{marks[1]} {''.join(marks[2:3])} b{marks[1]} {''.join(marks[3:])}",
        )
        for marks in MARKERS.values()
        for state in STATES
    ),
    ({"reasoning": CHANNELS}, f"{HEAD}a{NEXT}<|channel|>final<|message|>b<|return|>"),
    (
        {"reasoning": CHANNELS, "tools": ToolUse("channels", ("f",), True)},
        f"{HEAD}a{NEXT} to=functions.f<|channel|>commentary<|message|>{{}}",
    ),
    *(({"tools": ToolUse(kind, ("f",), True)}, f"{call}\n") for kind, call in sorted(CALLS.items())),
    *(({"tools": ToolUse(kind, ("f",), False, True)}, call[:-2]) for kind, call in sorted(CALLS.items())),
    ({"stop": ["b"], "min_tokens": 3, "include_stop_str_in_output": True}, "bab b"),
]
TOLD = {1: "0bfe778422562b0440bdb5f781d9ba8cd5ff1619e5dfabf213bdf4edca7b6a57"}
"""By version: the digest of what RECORDS tell. An entry stays as it is once a build has that version."""


def told(fields: dict[str, Any], text: str) -> list[Any]:
    choice, found = ChoiceText(stored(spec(endpoint="chat", stop_ids=[], **fields)), model(), [50]), []
    tokens = model().encode(text)
    for at, token in enumerate(tokens, 1):
        if choice.finish_reason is None:
            content, _, _ = choice.feed([token], "stop" if at == len(tokens) else None)
            found += [choice.reasoning, content, [(call.name, call.arguments) for call in choice.calls]]
    return [*found, choice.finish_reason, choice.reasoning_tokens]


def test_record_tells_the_same_while_its_version_is_the_same() -> None:
    digest = hashlib.sha256(repr([told(*record) for record in RECORDS]).encode()).hexdigest()
    if TOLD.get(VERSION) != digest:
        pytest.fail(f"records of version {VERSION} tell something else: raise VERSION in request.py; TOLD: {digest}")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt_tails": [pack([50, -1])]}, "token -1 is outside the vocabulary"),
        ({"prompt_tails": [pack([50, 1 << 20])]}, "token 1048576 is outside the vocabulary"),
        ({"logprobs": 1000}, "logprobs: 999 tokens"),
        ({"prompt_logprobs": 1000}, "prompt_logprobs: 999 tokens"),
    ],
)
def test_record_that_no_gateway_wrote_is_refused(changes: dict[str, Any], said: str) -> None:
    written = queue_pb2.Delivery.FromString(spec(endpoint="chat").to_delivery(lambda prompt, _: list(prompt)))
    for name in changes:
        written.ClearField(name)
    written.MergeFrom(queue_pb2.Delivery(**changes))
    with pytest.raises(ValueError, match=said):
        GenerationSpec.from_record("cmpl-1", model().vocab_size, {b"delivery": written.SerializeToString()})
