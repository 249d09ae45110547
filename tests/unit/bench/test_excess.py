"""The load generator of the overload study adds nothing of its own to the times that it measures."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.studies import excess
from bench.studies.excess import Client, Sample, figures, with_client


@dataclass
class SlowDraws:
    """Stand in for the module time: each draw of arrivals takes ten seconds."""

    passed_s: float = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.passed_s


@dataclass
class SlowClient(Client):
    """Send nothing."""

    clock: SlowDraws = field(default_factory=SlowDraws)

    def arrivals(self, begin: float, rps: float, span_s: float) -> list[Sample]:
        self.clock.passed_s += 10
        return super().arrivals(begin, rps, span_s)

    async def send(self, one: Sample) -> Sample:
        one.sent = self.clock.monotonic()
        one.status = 200
        self.samples.append(one)
        return one


async def test_first_requests_are_not_due_before_all_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    async with aiohttp.ClientSession() as session:
        client = SlowClient(session, "", "", ["key"], np.random.default_rng(1))
        monkeypatch.setattr(excess, "time", client.clock)
        before = client.clock.monotonic()
        change = await asyncio.wait_for(client.overload(200, 100, 0.2, 0.1), 30)
        assert len([one for one in client.samples if one.due < change]) > 10 < len(client.samples)
        assert min(one.due for one in client.samples) >= before + 20
        assert figures(client.samples, 0.3)["sent_after_s"]["p50"] < 10


async def test_client_settles_before_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full collections of its garbage once were most of what the study measured."""
    calls: list[str] = []
    monkeypatch.setattr(excess, "settle", lambda: calls.append("settle"))

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "model"}]})

    async def measure(client: Client) -> dict[str, Any]:
        calls.append(client.model)
        return {}

    app = web.Application()
    app.router.add_get("/v1/models", models)
    async with TestServer(app) as server:
        await with_client(str(server.make_url("")).rstrip("/"), ["key"], measure)
    assert calls == ["settle", "model"]
