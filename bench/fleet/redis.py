"""The cost of a request and of an iteration for Redis: `python -m bench.fleet.redis`, for docs/scale.md.

The services' own scripts and encodings against a server of its own with an append-only file, as deployed; the figure is
the server's own CPU time (INFO cpu), which other programs on the machine change little.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import redis

from bench.gateway.publisher import Publisher
from bench.local import redis_server
from bench.result import RESULTS, ROOT, provenance, write
from protos import queue_pb2
from services.gateway.admission import Bounds
from services.gateway.auth import Caller
from services.gateway.delivery.dispatcher import enqueue_arguments, entry_of
from services.gateway.request import GenerationSpec
from services.launcher.redis_server import version_text
from services.scheduler.core.types import Finish, Outcome
from shared.keys import Keys
from shared.redis_client import Value, source
from shared.settings import DEMO_MODEL, GatewaySettings

RESULT = ROOT / "bench" / "results" / "fleet-redis.json"
RUNNING, ITERATIONS, PROMPT, CHECKPOINT = 256, 1000, 512, 32
GATEWAY = "gateway-bench"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="fewer than the default are written nowhere")
    options = parser.parse_args()
    facts = provenance(["python", "-m", "bench.fleet.redis"], "orcinus", "redis")
    with tempfile.TemporaryDirectory() as directory, redis_server(Path(directory)) as (_, client):
        found = measure(client, options.iterations)
        version = version_text(client.info("server"))
    whole = {
        "bench": "fleet-redis", **facts, "versions": {**facts["versions"], "redis-server": version},
        "running": RUNNING, "iterations": options.iterations, "prompt_tokens": PROMPT, "cpu_us": found,
    }  # fmt: skip
    print(json.dumps(whole, indent=1))
    if options.iterations == ITERATIONS:
        write(RESULTS / "fleet-redis.json", whole)
    return 0


def measure(client: redis.Redis, iterations: int) -> dict[str, float]:
    """Microseconds of the server's CPU time: per request enqueued, claimed, ended; per iteration of RUNNING tokens
    published, and read by a gateway; per checkpoint of a sequence."""
    keys = Keys("bench")
    publisher = Publisher(client, keys, [1, 2, 3])
    enqueue = client.register_script(source("enqueue"))
    found: dict[str, float] = {}
    waves = max(1, iterations // 100)
    spent = dict.fromkeys(("enqueue", "claim", "publish", "read", "checkpoint", "end"), 0.0)
    last = b"0"
    for wave in range(waves):
        calls = asyncio.run(_calls(keys, [f"cmpl-{wave:06d}{at:06d}" for at in range(RUNNING)]))
        with _spent(client, spent, "enqueue"):
            for where, values in calls:
                ((verdict, *_),) = enqueue(keys=where, args=values)
                if verdict != b"ok":
                    raise RuntimeError(f"enqueue.lua: {verdict!r}; the bounds of the bench are too small")
        with _spent(client, spent, "claim"):
            publisher.claim(RUNNING, lambda: None)
        with _spent(client, spent, "publish"):
            for _ in range(iterations // waves):
                publisher.step()
        with _spent(client, spent, "read"):
            while True:
                rows: Any = client.xread({keys.tokens(GATEWAY): last}, count=1)
                if not rows:
                    break
                last = rows[0][1][-1][0]
        with _spent(client, spent, "checkpoint"):
            publisher.publish(Outcome(checkpoints=_checkpoints(publisher)))
        with _spent(client, spent, "end"):
            publisher.step(Finish.LENGTH)
    requests = RUNNING * waves
    done = iterations // waves * waves
    found = {f"{name}_request": spent[name] / requests for name in ("enqueue", "claim", "end")}
    found |= {f"{name}_iteration": spent[name] / done for name in ("publish", "read")}
    found["checkpoint_sequence"] = spent["checkpoint"] / requests
    found["token"] = (found["publish_iteration"] + found["read_iteration"]) / RUNNING
    found["token"] += found["checkpoint_sequence"] / CHECKPOINT
    found["request"] = sum(found[f"{name}_request"] for name in ("enqueue", "claim", "end"))
    return {name: round(value, 3) for name, value in found.items()}


def _checkpoints(publisher: Publisher) -> list[Any]:
    tokens = np.arange(CHECKPOINT, dtype=np.int32)
    return [(request.id, 0, 0, tokens) for request in publisher.requests]


async def _calls(keys: Keys, names: list[str]) -> list[tuple[list[str], list[Value]]]:
    """Return keys and arguments of enqueue.lua as a gateway sends them, for one request each."""
    settings, caller = GatewaySettings(model=DEMO_MODEL, max_queued_tokens=1 << 30), Caller("alice")
    calls = []
    for name in names:
        spec = GenerationSpec(
            name, "completions", "bench", 1, [list(range(PROMPT))], 1, 256, queue_pb2.Sampling(), priority="normal"
        )
        delivery = spec.to_delivery(lambda prompt, _: list(prompt[-8:]))
        entry = entry_of(keys, GATEWAY, spec, caller, delivery, Bounds.of(settings, spec, caller, None), 0.0)
        calls.append(enqueue_arguments(keys, GATEWAY, [entry], 0.0))
    return calls


@contextlib.contextmanager
def _spent(client: redis.Redis, spent: dict[str, float], name: str) -> Iterator[None]:
    before = _cpu_us(client)
    yield
    spent[name] += _cpu_us(client) - before


def _cpu_us(client: redis.Redis) -> float:
    info = client.info("cpu")
    return 1e6 * (float(info["used_cpu_user"]) + float(info["used_cpu_sys"]))


if __name__ == "__main__":
    sys.exit(main())
