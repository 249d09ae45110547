"""Drafts on a whole stack, also when worker and scheduler are killed: the tokens are those without."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.chaos.streams import Stream, common
from tests.support.stack import START_S, Stack
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


def test_stop_string_ends_the_text_where_it_does_without_drafts(stack: Stack) -> None:
    body = {"model": stack.name, "max_tokens": 300, "temperature": 0.7, "seed": 7, "ignore_eos": True}

    def answered(**more: Any) -> tuple[dict[str, Any], int]:
        answer = stack.post("/v1/completions", body | more).json()
        details = answer["usage"].get("completion_tokens_details", {})
        return answer["choices"][0], details.get("accepted_prediction_tokens", 0)

    accepted = 0
    for prompt in PROMPTS:
        whole = answered(prompt=prompt, speculate=False)[0]["text"]
        stop = whole[-20:-10]
        plain, _ = answered(prompt=prompt, stop=stop, speculate=False)
        guessed, right = answered(prompt=prompt, stop=stop)
        assert guessed == plain
        assert (plain["finish_reason"], plain["text"]) == ("stop", whole[: whole.index(stop)])
        accepted += right
    assert accepted > 0
