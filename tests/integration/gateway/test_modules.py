"""How many of the gateway's modules run a function for one streamed chat request, in any thread.

A module counts only when it ran for every one of several requests, which leaves out tasks that run once a second.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

import services.gateway
from services.gateway.app import public_app
from services.gateway.gateway import Gateway
from services.gateway.http.server import server as http_server
from services.gateway.text.tokenizer import ModelText
from shared.settings import GatewaySettings
from tests.support.checkpoints.tokenizers import write_model
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import ScriptedScheduler, answering
from tests.support.waiting import free_port, wait_until

MAX_CROSSED = 12
ROOT = Path(services.gateway.__file__).parent
REQUESTS = 5


class Walk:
    """Note the gateway's modules in which a function runs, in threads that begin within the block, too."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def _note(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and (path := frame.f_code.co_filename).startswith(str(ROOT)):
            self.found.add(str(Path(path).relative_to(ROOT)))

    def __enter__(self) -> Walk:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


async def test_streamed_chat_crosses_few_modules(tmp_path: Path, redis_server: RedisServer) -> None:
    port = free_port()
    model = ModelText(write_model(tmp_path / "m"))
    settings = GatewaySettings(model=tmp_path / "m", redis_url=redis_server.url, port=port)
    gateway = Gateway(settings, model)
    scheduler = ScriptedScheduler(redis_server.client, settings.keys).lead()
    await gateway.start()
    front = http_server(public_app(gateway), settings)
    front.config.port = port
    serving = asyncio.create_task(front.serve())
    await wait_until(lambda: front.started and not gateway.reason_not_ready())
    body = {
        "model": settings.served_model_name, "stream": True, "max_tokens": 12,
        "messages": [{"role": "user", "content": "def"}],
    }  # fmt: skip
    walks = []
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        with answering(scheduler, lambda _: list(range(10, 22))), Walk() as walk:
            for _ in range(REQUESTS):
                walk.found = set()
                answer = await client.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200
                assert answer.text.endswith("data: [DONE]\n\n")
                walks.append(walk.found)
    front.should_exit = True
    await serving
    await gateway.stop()
    model.close()
    crossed = set.intersection(*walks)
    assert len(crossed) <= MAX_CROSSED, "\n".join(sorted(crossed))
    assert {"http/protocol.py", "openai/chat.py", "text/chat_template.py"} <= crossed
