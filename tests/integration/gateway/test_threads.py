"""Work on the texts of requests counts for the tenant of the key, by whichever way the request comes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from services.gateway.auth import Caller
from services.gateway.batches.handler import Exchange
from services.gateway.request import ARRIVAL
from shared.settings import GatewaySettings
from tests.integration.conftest import KEY, OTHER
from tests.integration.gateway.conftest import asgi, in_process
from tests.support.gateway import generations
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import ScriptedScheduler


async def test_work_counts_for_the_tenant_of_its_key(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis_server.client.flushall()
    (tmp_path / "keys").write_text(f"{KEY}\n{OTHER}\n")
    settings = GatewaySettings(model=tmp_path / "m", redis_url=redis_server.url, api_key_file=tmp_path / "keys")
    ScriptedScheduler(redis_server.client, settings.keys).lead()
    async with in_process(settings, generations.model()) as gateway:
        threads, seen = gateway.first_model.text.threads, list[str]()
        run = threads.run

        async def noted(function: Callable[..., Any], *args: Any) -> Any:
            seen.append(ARRIVAL.get().tenant)
            return await run(function, *args)

        monkeypatch.setattr(threads, "run", noted)
        body = {"model": gateway.first_model.name, "prompt": [[5] * 100_000, [0.5]]}
        async with asgi(gateway) as client:
            for key in (KEY, OTHER):
                headers = {"Authorization": f"Bearer {key}"}
                assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 400
        assert gateway.batches.app is not None
        await Exchange(Caller("of-a-line"), "/v1/completions", orjson.dumps(body), "name", "id").run(
            gateway.batches.app
        )
    first, second, third = seen
    assert len({first, second}) == 2 and "" not in seen and third == "of-a-line"
