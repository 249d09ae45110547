"""Drafts on a whole stack, also when worker and scheduler are killed: the tokens are those without."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.chaos.streams import Stream, common
from tests.support import sse
from tests.support.stack import PLAIN, START_S, Stack
from tests.support.waiting import until

TOKENS = 450
PROMPTS = (
    "def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n",
    "1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4,",
    "class A:\n    pass\n\n\nclass B:\n    pass\n\n\nclass C:\n",
)
TEMPERATURES = (0.0, 0.7)
BOUND = {"guided_regex": r"[a-z0-9, ]{4000,}", "ignore_eos": False}
STACK = {"dtype": "float32", "speculate": "auto", "stats_ms": 100}


def streams(stack: Stack, speculate: bool) -> list[Stream]:
    """One stream for each prompt and temperature, with and without a grammar."""
    body = common(stack, TOKENS)
    bodies: list[dict[str, Any]] = [
        {**body, "prompt": prompt, "temperature": temperature, "seed": 7, "speculate": speculate, **grammar}
        for prompt in PROMPTS
        for temperature in TEMPERATURES
        for grammar in ({}, BOUND)
    ]
    return [Stream([stack.url], each) for each in bodies]


def accepted(stack: Stack) -> int:
    """Drafts that were right, as the scheduler that runs has counted."""
    return int(stack.stats().get("accepted_tokens", "0"))


def kill(stack: Stack, service: str, running: list[Stream], before: int) -> None:
    """Kill a service once more drafts than `before` were right and a stream still runs; start it again."""
    until("drafts are accepted", lambda: accepted(stack) > before, 60)
    assert not all(stream.reason for stream in running), "all ended before the fault; give more tokens"
    stack.kill(service)
    stack.start(service)


def test_tokens_are_those_without_drafts_when_worker_and_scheduler_die(stack: Stack) -> None:
    plain, drafted = streams(stack, speculate=False), streams(stack, speculate=True)
    with ThreadPoolExecutor(len(plain)) as pool:
        expected = list(pool.map(Stream.read, plain))
        assert accepted(stack) == 0
        answers = [pool.submit(stream.read) for stream in drafted]
        kill(stack, "worker", drafted, before=0)
        kill(stack, "scheduler", drafted, before=accepted(stack))
        until("the new scheduler has drafts accepted", lambda: accepted(stack) > 0, START_S)
        tokens = [answer.result() for answer in answers]
    assert [len(ids) for ids in expected] == [TOKENS] * len(plain)
    assert tokens == expected
    stack.settled_empty()


def test_stop_strings_end_streamed_choices_where_they_do_without_drafts(stack: Stack) -> None:
    """Two choices with a stop string each; the prediction is what they say without."""
    accepted = 0
    for prompt in PROMPTS:
        body = {**common(stack, 300), "prompt": prompt, "n": 2, "temperature": 0.7, "seed": 7}
        whole, _ = streamed(stack, body)
        stops = [text[-20:-10] for text, _, _ in whole]
        plain, _ = streamed(stack, {**body, "stop": stops})
        prediction = {"type": "content", "content": "".join(text for text, _, _ in whole)}
        found, right = streamed(stack, {**body, "stop": stops, "speculate": True, "prediction": prediction})
        assert found == plain
        for (text, ids, reason), (whole_text, whole_ids, _) in zip(plain, whole, strict=True):
            end = min(whole_text.index(stop) for stop in stops if stop in whole_text)
            assert (text, reason) == (whole_text[:end], "stop") and ids == whole_ids[: len(ids)]
        accepted += right
    assert accepted > 0


def streamed(stack: Stack, body: dict[str, Any]) -> tuple[list[tuple[str, list[int], str]], int]:
    """Return text, token ids and finish reason of each choice of a stream, and how many drafts were right."""
    choices = [("", list[int](), "") for _ in range(body["n"])]
    accepted = 0
    asked = {"json": body | {"stream_options": {"include_usage": True}}, "timeout": START_S, "verify": PLAIN}
    with httpx.stream("POST", f"{stack.url}/v1/completions", **asked) as answer:
        answer.raise_for_status()
        events = [event.json for event in sse.events(answer.iter_lines()) if event.data != sse.DONE]
    for event in events:
        for choice in event["choices"]:
            text, ids, _ = choices[choice["index"]]
            ids = ids + (choice.get("token_ids") or [])
            choices[choice["index"]] = (text + choice["text"], ids, choice["finish_reason"] or "")
        details = (event.get("usage") or {}).get("completion_tokens_details", {})
        accepted += details.get("accepted_prediction_tokens", 0)
    return choices, accepted
