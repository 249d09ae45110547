"""The load of a chaos run, by a seed: a few templates of requests, and clients that choose among them and of plans.

A template is run undisturbed first, which says what every later run of it has to give. So it must be a function of
its body alone: greedy, or sampled with a seed.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from shared.keys import CLASSES
from tests.chaos.harness.client import Client, Order, Sessions
from tests.chaos.harness.history import DONE, History, Outcome, Plan

PLANS: tuple[tuple[Plan, int], ...] = (("stay", 12), ("return", 4), ("leave", 2), ("cancel", 2), ("slow", 1))
"""With how often each comes among so many streams, in any order: a run on a slow machine has few streams."""

BACKGROUND = 0.25
"""Of the calls without streaming; the others stay."""

SLOW_CHOICES = 4
"""Of what slow clients ask for: much, so that it does not fit into what lies between a gateway and them."""

LONG_TOKENS = 600
"""Of a prompt that fills more blocks than its share."""

GRAMMAR, GRAMMAR_TOKENS = "grammar", 240
"""How the names of templates with a grammar begin; more tokens than either needs."""

PATTERN = r"[a-z]{3,9}( [a-z]{3,9}){4,12}\."

PREDICTED = "sampled x2 stream"
"""The template that is also sent with its output as the prediction."""

MUCH = f"much x{SLOW_CHOICES} stream"
"""The template of slow clients alone."""


@dataclass(frozen=True, slots=True)
class Template:
    """A request that may be sent any number of times."""

    name: str
    body: dict[str, Any]
    path: str = "/v1/completions"

    @property
    def choices(self) -> int:
        return int(self.body.get("n", 1))

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream", False))


def templates(model: str, tokens: int, seed: int) -> list[Template]:
    """Greedy and sampled, one and several choices, streams and whole answers, over all classes.

    tokens: the longest output. Prompts are token ids of the model's vocabulary, so no tokenizer is in the way.
    """
    rng = random.Random(seed)
    found = []
    for number, (kind, choices, stream) in enumerate(
        (kind, choices, stream)
        for kind in ("greedy", "sampled")
        for choices, stream in ((1, True), (1, False), (2, True), (3, True), (2, False))
    ):
        body: dict[str, Any] = {
            "model": model, "prompt": [rng.randrange(300, 1900) for _ in range(rng.randint(3, 90))], "n": choices,
            "max_tokens": rng.randint(tokens // 3, tokens), "temperature": 0 if kind == "greedy" else 0.9,
            "seed": rng.randrange(1 << 31), "ignore_eos": True, "return_token_ids": True, "stream": stream,
            "priority": CLASSES[number % len(CLASSES)],
        }  # fmt: skip
        if stream:
            body["stream_options"] = {"include_usage": True}
        found.append(Template(f"{kind} x{choices} {'stream' if stream else 'whole'}", body))
    words = " ".join(rng.choice(("whale", "river", "stone", "light", "paper")) for _ in range(20))
    chat = {**found[0].body, "messages": [{"role": "user", "content": words}], "priority": "high"}
    del chat["prompt"]
    much = {**found[0].body, "n": SLOW_CHOICES, "max_tokens": tokens, "priority": "low"}
    long = {**found[0].body, "prompt": [rng.randrange(300, 1900) for _ in range(LONG_TOKENS)], "priority": "normal"}
    return [
        *found,
        Template("chat stream", chat, "/v1/chat/completions"),
        Template("long prompt stream", long),
        Template(MUCH, much),
    ]


def grammars(model: str, seed: int) -> list[Template]:
    """Sampled answers that a grammar binds and ends: a pattern in a stream, a JSON schema in a whole answer. The
    text of the schema is so long that it lies in Redis apart from its requests.
    """
    rng = random.Random(seed)
    number = {"type": "integer", "minimum": 0, "maximum": 9999}
    properties = {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["whale", "river", "stone"]},
        "counts": {"type": "array", "items": number, "minItems": 3, "maxItems": 8},
    }
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    schema["description"] = "An animal or a thing, and three to eight counts. " * 40
    common = {
        "model": model, "prompt": [rng.randrange(300, 1900) for _ in range(30)], "max_tokens": GRAMMAR_TOKENS,
        "temperature": 0.9, "seed": rng.randrange(1 << 31), "return_token_ids": True,
    }  # fmt: skip
    pattern = {"guided_regex": PATTERN, "priority": "realtime"}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return [
        Template(f"{GRAMMAR} regex stream", {**common, **stream, **pattern}),
        Template(f"{GRAMMAR} schema whole", {**common, "guided_json": schema, "priority": "normal"}),
    ]


def with_stop(template: Template, outcome: Outcome) -> Template | None:
    """The same request ended by a stop string: a few characters from the second half of what it says, or None where
    they stand earlier, too."""
    text = outcome.texts[0]
    at = len(text) * 2 // 3
    stop = text[at : at + 6]
    if len(stop.strip()) < 3 or text.index(stop) < len(text) // 4:
        return None
    return Template(f"{template.name} stop", {**template.body, "stop": [stop]}, template.path)


def with_prediction(template: Template, outcome: Outcome) -> Template:
    """Return the same request with the outputs of its choices as the prediction: most of its drafts are right."""
    prediction = {"type": "content", "content": "".join(outcome.texts)}
    return Template(f"{template.name} prediction", {**template.body, "prediction": prediction}, template.path)


def _new_key() -> str:
    """Return an idempotency key that no earlier run had: on a stack that runs on, that key means an earlier request."""
    return f"chaos {secrets.token_hex(8)}"


async def undisturbed(session: aiohttp.ClientSession, urls: list[str], template: Template) -> Outcome:
    """Return what the template gives while nothing else runs, without drafts. Raise RuntimeError if it ends badly."""
    history = History(-1, template.name, template.choices, template.stream, "stay", key=_new_key())
    body = {**template.body, "speculate": False}
    await Client(session, urls, Order(history, body, template.path, 0, 0)).run()
    last = history.connections[-1]
    if last.end != DONE or last.usage is None:
        raise RuntimeError(f"the undisturbed run of {template.name} ended with {last.end} {last.text}")
    events = history.events()
    of = [[event for event in events if event.choice == choice] for choice in range(template.choices)]
    return Outcome(
        tokens=[[token for event in own for token in event.token_ids] for own in of],
        texts=["".join(event.text for event in own) for own in of],
        finishes=["".join(event.finish for event in own) for own in of],
        usage=last.usage,
    )


class Load:
    """A closed loop of so many clients, until it is told to stop; what has begun goes on to its end."""

    def __init__(self, tenants: Sequence[Sessions], urls: list[str], choice: list[Template], seed: int) -> None:
        """tenants: requests are theirs in turn."""
        self._tenants, self._urls = tenants, urls
        self._templates = [template for template in choice if template.name != MUCH]
        self._much = [template for template in choice if template.name == MUCH]
        self._rng = random.Random(seed)
        self.is_stopping = False
        self._plans: list[Plan] = []
        self.histories: list[History] = []

    def stop(self) -> None:
        """Nothing new from now on."""
        self.is_stopping = True

    async def run(self, clients: int, ended: Callable[[History], None]) -> None:
        """ended: called with each history at its end."""
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(self._one_after_another(ended))

    async def _one_after_another(self, ended: Callable[[History], None]) -> None:
        while not self.is_stopping:
            order = self._order()
            self.histories.append(order.history)
            tenant = self._tenants[order.history.tenant]
            session = tenant.narrow if order.history.plan == "slow" else tenant.usual
            await Client(session, self._urls, order).run()
            ended(order.history)
            if not order.history.accepted:
                await asyncio.sleep(0.2)  # it was refused: the next one need not hurry

    def _dealt(self) -> Plan:
        """Return the next plan of a stream."""
        if not self._plans:
            self._plans = [plan for plan, count in PLANS for _ in range(count)]
            self._rng.shuffle(self._plans)
        return self._plans.pop()

    def _order(self) -> Order:
        template = self._rng.choice(self._templates)
        whole: Plan = "background" if self._rng.random() < BACKGROUND else "stay"
        plan = self._dealt() if template.stream else whole
        template = self._much[0] if plan == "slow" and self._much else template
        # A client that leaves for good has no key: with one its request would go on. One that returns needs it.
        named = plan == "return" or not template.stream or (plan in ("stay", "cancel") and self._rng.random() < 0.5)
        number = len(self.histories)
        key = _new_key() if named else ""
        history = History(number, template.name, template.choices, template.stream, plan, key)
        history.tenant = number % len(self._tenants)
        body = {**template.body, "background": True} if plan == "background" else template.body
        return Order(history, body, template.path, self._rng.randint(1, 40), self._rng.randrange(1 << 31))
