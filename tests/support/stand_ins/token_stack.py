"""A gateway and a scheduler as processes over a real Redis, with token workers in this process."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from shared.keys import Keys
from tests.support.checkpoints.tokenizers import write_model
from tests.support.forked import Forked
from tests.support.gateway.process import GatewayProcess
from tests.support.stack import PATIENT_MS, PLAIN, RedisServer
from tests.support.stand_ins.token_worker import TokenWorker, answer
from tests.support.waiting import until

KEY = "sk-test-0123456789"
PROMPT, TOKENS = [97, 98, 99], 40


class TokenStack:
    """Redis, one gateway, one scheduler, and the workers that a test adds. Times of the settings are short."""

    def __init__(self, directory: Path, redis: RedisServer) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.redis = redis
        model = write_model(directory / "tiny")
        (directory / "keys").write_text(f"{KEY}\n")
        self.gateway = GatewayProcess(directory, model, redis.url, api_key_file=directory / "keys", lease_ms=PATIENT_MS)
        self.gateway.key = KEY
        self.keys: Keys = self.gateway.keys
        self.workers: list[TokenWorker] = []
        self._log = directory / "scheduler.log"
        self._scheduler: Forked | None = None

    def __enter__(self) -> TokenStack:
        self.gateway.start()
        self.start_scheduler()
        self.gateway.wait_live()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            print(self.log()[-8000:], self.gateway.log()[-4000:], file=sys.stderr)
        self.kill_scheduler(signal.SIGTERM)
        self.gateway.stop()
        for worker in self.workers:
            worker.stop()

    def worker(self, name: str, **info: Any) -> TokenWorker:
        """Add a worker, which is not started yet."""
        self.workers.append(TokenWorker(name, self.keys, self.redis.client, **info))
        return self.workers[-1]

    def start_scheduler(self) -> None:
        self._scheduler = Forked("scheduler", self.gateway.environment, self._log)

    def kill_scheduler(self, how: int = signal.SIGKILL) -> None:
        if self._scheduler is not None and self._scheduler.poll() is None:
            self._scheduler.send_signal(how)
            self._scheduler.wait(60)
            self.redis.client.delete(self.keys.lease("shard-0"))  # as if it had run out

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def check_alive(self, leads_anew: bool = False) -> None:
        """Raise AssertionError if a service has ended by itself. leads_anew: a scheduler may, as its lease was changed;
        another one starts.
        """
        assert self._scheduler is not None
        ended = self._scheduler.poll()
        if leads_anew and ended == 1:
            self.redis.client.delete(self.keys.lease("shard-0"))  # as if it had run out
            self.start_scheduler()
        else:
            assert ended is None, f"the scheduler ended with {ended}:\n{self.log()[-4000:]}"
        assert self.gateway.process is not None
        assert self.gateway.process.poll() is None, f"the gateway ended:\n{self.gateway.log()[-4000:]}"

    def ask(
        self,
        seconds: float = 30.0,
        prompt: list[int] = PROMPT,
        tokens: int = TOKENS,
        key: str = "",
        **fields: Any,
    ) -> httpx.Response:
        """Send a request and return its answer. key: of idempotence; sent again, the answer is read from its record."""
        body = {
            "model": self.gateway.name, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, **fields,
        }  # fmt: skip
        url = self.gateway.url + "/v1/completions"
        headers = self.gateway.headers() | ({"Idempotency-Key": key} if key else {})
        return httpx.post(url, json=body, headers=headers, timeout=seconds, verify=PLAIN)

    def answers(self, prompt: list[int] = PROMPT) -> bool:
        """Return whether a request is answered now. Raises AssertionError for a wrong answer, and a dead service."""
        self.check_alive()
        response = self.ask(prompt=prompt)
        if response.status_code != 200:
            return False
        assert response.json()["choices"][0]["token_ids"] == answer(prompt, TOKENS)
        return True

    def wait_answer(self, seconds: float = 40.0) -> None:
        """Wait for a right answer. A service that reads a spoilt record later may refuse the next request again."""
        until("a request is answered", self.answers, seconds)
