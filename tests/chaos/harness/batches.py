"""Batches beside the load of a mixed run, one at a time: each line is answered as its template was undisturbed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import orjson

from tests.chaos.harness.checker import Violation, check_tokens
from tests.chaos.harness.client import Sessions, take_whole
from tests.chaos.harness.history import Connection, History, Outcome
from tests.chaos.harness.load import Load, Template
from tests.chaos.harness.target.stack import NotReadyError, until

PATH = "/v1/completions"
LINES = 6
ENDED = ("completed", "failed", "expired", "cancelled")
BATCH_S = 120.0
NOT_OF_LINES = ("stream", "stream_options", "priority")
"""Fields of a template that a line may not have: all lines are of class low."""


class Batches:
    """One after another, those of each tenant in turn."""

    def __init__(
        self,
        tenants: Sequence[Sessions],
        urls: list[str],
        templates: Sequence[Template],
        outcomes: Mapping[str, Outcome],
        seed: int,
    ) -> None:
        self._tenants, self._urls, self._templates, self._outcomes = tenants, urls, templates, outcomes
        self._rng = random.Random(seed)
        self.count = self.lines = 0
        self.violations: list[Violation] = []

    async def run(self, load: Load) -> None:
        """Until the load stops; the batch that has begun goes on to its end. Raises NotReadyError."""
        while not load.is_stopping:
            await self._one(self._tenants[self.count % len(self._tenants)].usual)
            self.count += 1

    async def _one(self, tenant: aiohttp.ClientSession) -> None:
        chosen = self._rng.choices([template for template in self._templates if template.path == PATH], k=LINES)
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", b"\n".join(_line(*each) for each in enumerate(chosen)), filename="in.jsonl")
        given = (await self._ask(tenant, "POST", "files", data=form))["id"]
        order = {"input_file_id": given, "endpoint": PATH, "completion_window": "24h"}
        batch = (await self._ask(tenant, "POST", "batches", json=order))["id"]

        async def ended() -> Any:
            found = await self._ask(tenant, "GET", f"batches/{batch}")
            return found if found["status"] in ENDED else None

        found = await until(f"{batch} has ended", ended, BATCH_S, every=0.25)
        output = found["output_file_id"]
        rows = await self._ask(tenant, "GET", f"files/{output}/content") if output else []
        if [row["custom_id"] for row in rows] != [str(number) for number in range(LINES)]:
            self.violations.append(Violation("lost", batch, f"not each line has its answer: {found}"))
        for row in rows:
            self._check(row["response"], chosen[int(row["custom_id"])])
        for file in filter(None, (given, output, found["error_file_id"])):
            await self._ask(tenant, "DELETE", f"files/{file}")

    def _check(self, answer: dict[str, Any], template: Template) -> None:
        connection = Connection(0, 0.0)
        take_whole(answer["body"], connection)
        history = History(self.lines, f"batch line of {template.name}", template.choices, False, "stay")
        history.request, history.connections = answer["request_id"], [connection]
        self.violations += check_tokens(history, self._outcomes[template.name])
        self.lines += 1

    async def _ask(self, tenant: aiohttp.ClientSession, method: str, path: str, **body: Any) -> Any:
        """Return the answer of any gateway; of a file's content its lines. Raises NotReadyError."""
        async with tenant.request(method, f"{self._rng.choice(self._urls)}/v1/{path}", **body) as answer:
            told = await answer.read()
            if answer.status != 200:
                raise NotReadyError(f"{method} {path}: {answer.status} {told.decode()}")
        return [orjson.loads(line) for line in told.splitlines()] if path.endswith("/content") else orjson.loads(told)


def _line(number: int, template: Template) -> bytes:
    body = {name: value for name, value in template.body.items() if name not in NOT_OF_LINES}
    return orjson.dumps({"custom_id": str(number), "method": "POST", "url": PATH, "body": body})
