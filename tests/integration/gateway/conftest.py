"""The official client of a gateway process, and a gateway within this process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from services.gateway.app import public_app
from services.gateway.gateway import Gateway
from services.gateway.text.tokenizer import ModelText
from shared.settings import GatewaySettings
from tests.integration.conftest import KEY
from tests.support.gateway import generations
from tests.support.gateway.clients import openai_client
from tests.support.gateway.process import GatewayProcess
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import ScriptedScheduler
from tests.support.waiting import wait_until


@pytest.fixture
def client(gateway: GatewayProcess, scheduler: ScriptedScheduler) -> Iterator[openai.OpenAI]:
    with openai_client(gateway, KEY) as made:
        yield made


def asgi(gateway: Gateway) -> httpx.AsyncClient:
    """Return a client of a gateway in this process."""
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(public_app(gateway)), base_url="http://localhost", timeout=60
    )


EVERY_S = 0.1
"""A gateway in this process looks at Redis so often, where others do so once a second."""
LOOKS = [
    "cluster.EVERY_S",
    "delivery.dispatcher.EVERY_S",
    "delivery.background.EVERY_S",
    "models.EVERY_S",
    "published.EVERY_S",
]


@contextlib.asynccontextmanager
async def in_process(settings: GatewaySettings, text: ModelText) -> AsyncIterator[Gateway]:
    """Yield a gateway that sees a scheduler."""
    with pytest.MonkeyPatch.context() as patch:
        for name in LOOKS:
            patch.setattr(f"services.gateway.{name}", EVERY_S)
        patch.setattr("services.gateway.delivery.response_store.PATIENCE_S", 60.0)  # a busy machine is no failure
        running = Gateway(settings, text)
        await running.start()
        try:
            await wait_until(lambda: not running.reason_not_ready())
            yield running
        finally:
            await running.stop()


@pytest.fixture
async def local_gateway(redis_server: RedisServer, tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway in this process that sees a scheduler, over an empty Redis.

    The secret of ids stays: the module may have a gateway process as well, to which a new one comes within a second.
    """
    settings = GatewaySettings(model=tmp_path / "m", redis_url=redis_server.url)
    secret = redis_server.client.get(settings.keys.keys_salt)
    redis_server.client.flushall()
    if secret is not None:
        redis_server.client.set(settings.keys.keys_salt, secret)
    ScriptedScheduler(redis_server.client, settings.keys).lead()
    async with in_process(settings, generations.model()) as running:
        yield running
