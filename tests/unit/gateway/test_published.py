"""What a gateway does with records of Redis that it follows while Redis fails and answers again."""

from __future__ import annotations

import asyncio
import logging

import pytest

from services.gateway import published
from services.gateway.published import Published
from shared.dead_letters import text
from shared.redis_client import connect
from shared.settings import GatewaySettings


async def test_first_of_several_failures_is_logged_until_redis_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(published, "EVERY_S", 0.0)
    answers = iter([ConnectionError("down"), ConnectionError("still down"), None, ConnectionError("down again")])
    redis = connect(GatewaySettings(), connections=1)
    names = Published("names", redis, text)

    async def look() -> None:
        if (error := next(answers, asyncio.CancelledError())) is not None:
            raise error

    with caplog.at_level(logging.WARNING, "orcinus.gateway"), pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(names.follow(look), 60)
    await redis.aclose()
    assert [record.message for record in caplog.records] == [
        "names not read from Redis: down",
        "names not read from Redis: down again",
    ]
