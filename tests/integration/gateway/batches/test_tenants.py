"""Tenants beside each other: one that uploads or sends as much as it can leaves room for another."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import openai
import pytest
from starlette.types import Receive, Scope, Send

from services.gateway.auth import Caller, Keyring
from services.gateway.batches.driver import MAX_DRIVEN, BatchDriver
from services.gateway.metrics import Metrics
from services.gateway.openai.files import MAX_UPLOADS
from shared.settings import GatewaySettings
from shared.tasks import end
from tests.integration.conftest import KEY, OTHER
from tests.integration.gateway.batches.test_batches import begin, ended, line, rows
from tests.support.gateway.clients import openai_client
from tests.support.gateway.process import GatewayProcess, running_gateway
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import ScriptedScheduler
from tests.support.waiting import until, wait_until
from tests.unit.gateway.batches.disk import lines_of, ordered


@pytest.fixture(scope="module")
def gateway(
    tmp_path_factory: pytest.TempPathFactory, model: Path, redis_server: RedisServer
) -> Iterator[GatewayProcess]:
    directory = tmp_path_factory.mktemp("gateway")
    (directory / "keys").write_text(f"{KEY}\n{OTHER}\n")
    files = {"files_dir": directory / "files", "batch_requests": 2 * MAX_DRIVEN}
    with running_gateway(directory, model, redis_server, api_key_file=directory / "keys", **files) as running:
        yield running


def client(gateway: GatewayProcess, key: str) -> openai.OpenAI:
    return openai_client(gateway, key)


def test_batch_runs_beside_many_of_another_tenant(gateway: GatewayProcess, scheduler: ScriptedScheduler) -> None:
    with client(gateway, KEY) as greedy, client(gateway, OTHER) as modest:
        batches = [begin(greedy, [line(f"{n}", gateway.name, max_tokens=1)]) for n in range(MAX_DRIVEN + 1)]
        waiting = [scheduler.claim() for _ in range(MAX_DRIVEN)]
        assert scheduler.claim_one() is None, "no more batches than a gateway drives"
        batch = begin(modest, [line("modest", gateway.name, max_tokens=1)])
        claimed = scheduler.claim()
        scheduler.serve(claimed, [50])
        assert [row["custom_id"] for row in rows(modest, ended(modest, batch).output_file_id)] == ["modest"]
        for each in waiting:
            scheduler.serve(each, [50])
        scheduler.serve(scheduler.claim(), [50])
        for number, made in enumerate(batches):
            assert [row["custom_id"] for row in rows(greedy, ended(greedy, made).output_file_id)] == [f"{number}"]
        assert scheduler.claim_one() is None, "no line is computed twice"


async def test_stopped_driver_begins_no_batch_in_place_of_another(redis_server: RedisServer, tmp_path: Path) -> None:
    """The stop comes while the one that makes room ends."""
    settings = GatewaySettings(model=tmp_path / "m", redis_url=redis_server.url, files_dir=tmp_path / "files")
    running, leaving, go = list[Scope](), asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        running.append(scope)
        try:
            await asyncio.Event().wait()
        finally:
            leaving.set()
            while not go.is_set():  # a cancellation is repeated
                with suppress(asyncio.CancelledError):
                    await go.wait()

    async def cancel(request_id: str, tenant: str) -> None: ...

    keyring = cast(Keyring, SimpleNamespace(has_read=True, caller=lambda key: Caller("greedy")))
    metrics = Metrics()
    driver = BatchDriver(settings, keyring, metrics, cancel)

    def driven() -> float | None:
        return metrics.registry.get_sample_value("orcinus_gateway_driven_batches")

    figures = [driven()]
    driver.app = app
    for _ in range(MAX_DRIVEN):
        ordered(driver.files, driver.batches, lines_of(1), tenant="greedy")
    looking = asyncio.create_task(driver.run())
    await wait_until(lambda: len(running) == MAX_DRIVEN)
    figures.append(driven())
    batch = ordered(driver.files, driver.batches, lines_of(1), tenant="modest")[0].id
    driver.wake()
    await leaving.wait()
    lease = settings.keys.batch_lease(batch)
    assert redis_server.client.exists(lease)
    stopping = asyncio.create_task(driver.stop())
    go.set()
    await stopping
    await wait_until(lambda: not redis_server.client.exists(lease))
    assert driver.batches.find("modest", batch).state.epoch == 0
    await end(looking)
    await driver.close()
    assert figures == [0, MAX_DRIVEN]


def test_slow_uploads_leave_room_for_another_tenant(gateway: GatewayProcess, scheduler: ScriptedScheduler) -> None:
    head = (
        f"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 9999\r\n"
        "Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\n"
        'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    )
    with ExitStack() as stack, client(gateway, KEY) as greedy, client(gateway, OTHER) as modest:
        for _ in range(MAX_UPLOADS):
            upload = stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port)))
            upload.sendall(head.encode())

        def is_refused() -> bool:
            try:
                greedy.files.create(file=("in.jsonl", b"{}\n"), purpose="batch")
            except openai.RateLimitError as error:
                return error.code == "too_many_uploads"
            return False

        until("a further upload is refused", is_refused)
        assert modest.files.create(file=("in.jsonl", b"{}\n"), purpose="batch").bytes == 3
