"""Workers as processes of their own, with what they say."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any, Self

import redis

from protos import worker_pb2
from shared.keys import Keys
from shared.settings import ROOT
from shared.wire.handshake import digest_of, version
from tests.support.launcher import settings_env

COMMAND = ("-m", "services.cli", "worker")


TOKEN = "of the lease"


def given_run(client: redis.Redis, model: str, epoch: int, worker: str = "worker-0") -> worker_pb2.Step:
    """Give a registered worker to shard-0 for a Run, as a scheduler does; return the Run's first step."""
    keys = Keys(model)
    client.hset(keys.worker(worker), mapping={"shard": "shard-0", "run": epoch})
    client.set(keys.lease("shard-0"), f"1:{digest_of(TOKEN)}")
    hello = worker_pb2.Hello(shard="shard-0", version=version(), token=TOKEN)
    return worker_pb2.Step(epoch=epoch, hello=hello)


class WorkerProcess:
    """Killed at the end of the block if it is there still."""

    def __init__(self, command: tuple[str, ...] = COMMAND, environment: dict[str, Any] | None = None, **settings: Any):
        told = settings_env(device="cpu", threads=1, **settings)
        told |= {name: str(value) for name, value in (environment or {}).items()}
        self.process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=told, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.process.stderr or []))
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join()
        print(f"the worker exited with {self.process.returncode}", *self.lines, sep="\n")  # pytest shows it on failure

    def says(self, words: str) -> bool:
        """Return whether it has said so, even if it has ended meanwhile. Raise RuntimeError if it never will."""
        has_ended = self.process.poll() is not None
        if has_ended:
            self._reader.join()
        if any(words in line for line in self.lines):
            return True
        if has_ended:
            raise RuntimeError(f"the worker ended: {self.lines}")
        return False

    def ends(self) -> int:
        """Wait for the end and all that it says; return its code."""
        code = self.process.wait(120)
        self._reader.join()
        return code
