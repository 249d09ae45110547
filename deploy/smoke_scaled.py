"""Check the promises of a scaled stack: `python3 -m deploy.smoke_scaled --project NAME --port PORT ...`.

Every worker has registered, is driven by the scheduler and computes, every gateway gets its part of the requests,
streams survive one that is killed, and gRPC is published. As smoke.py: standard library and the docker command only.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from deploy.smoke import PROMPT, BrokenPromiseError, Signals, Stack, check

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
"""With which a client of HTTP/2 begins: its magic words and an empty SETTINGS frame."""
SETTINGS = 4


def key_is_known(stack: Stack) -> None:
    logs = stack.compose("logs", "--no-color", "--no-log-prefix", "keys")
    stack.key = re.findall(r"sk-orcinus-[\w-]{40,}", logs)[0]


def counter(stack: Stack, service: str, index: int, port: int, name: str) -> float:
    """Return the sum of a metric of one container over its labels."""
    ask = (
        "from urllib.request import *; "
        f"print(urlopen(Request('http://127.0.0.1:{port}/metrics', headers={{'Authorization': 'Bearer {stack.key}'}}))"
        ".read().decode())"
    )
    text = stack.compose("exec", "-T", "--index", str(index), service, "python", "-c", ask)
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(rf"{name}[{{ ]", line))


def redis(stack: Stack, command: str) -> list[str]:
    """Return the lines of an answer."""
    ask = f"REDISCLI_AUTH=$(cat /secrets/redis-ops/password) redis-cli --user ops {command}"
    return stack.compose("exec", "-T", "redis", "sh", "-c", ask).split()


def all_workers_are_used(stack: Stack, workers: int) -> None:
    """Check that all workers register, are driven by the scheduler, and compute under load."""
    found = redis(stack, "zrange 'orcinus:{demo-model}:workers' 0 -1")
    check(len(found) == workers, f"{workers} workers are registered", found)
    by = time.monotonic() + 30
    driven = [""]
    while driven != [str(workers)] and time.monotonic() < by:
        driven = redis(stack, "hget 'orcinus:{demo-model}:stats:shard-0' workers")
        time.sleep(0.5)
    check(driven == [str(workers)], "the scheduler drives all of them", driven)
    body = {"model": "demo-model", "max_tokens": 200, "ignore_eos": True, "stream": True, "return_token_ids": True}
    streams = [Resuming(stack, {**body, "prompt": f"{number}. {PROMPT}"}) for number in range(8 * workers)]
    run_all(streams)
    check(all(len(stream.tokens) == 200 for stream in streams), "every stream has its tokens")
    computed = [
        counter(stack, "worker", index + 1, 9102, "orcinus_worker_sampled_tokens_total") for index in range(workers)
    ]
    check(all(computed), "all of them compute", computed)
    print(f"        tokens of each worker: {computed}")


def all_gateways_are_used(stack: Stack, gateways: int) -> None:
    """Check that requests over new connections reach every gateway."""

    def count() -> list[float]:
        name = "orcinus_gateway_time_to_first_token_seconds_count"  # of requests, not of health checks
        return [counter(stack, "gateway", index + 1, 8000, name) for index in range(gateways)]

    before = count()
    asked = 20 * gateways
    for _ in range(asked):
        body = {"model": "demo-model", "prompt": PROMPT, "max_tokens": 2}
        status, answer = stack.json("POST", "/v1/completions", body)
        check(status == 200, "a completion answers 200", answer)
    served = [now - then for now, then in zip(count(), before, strict=True)]
    check(min(served) >= asked // gateways // 2, f"each gateway gets its part of {asked} requests", served)
    print(f"        requests by gateway: {served}")


def streams_survive_a_gateway(stack: Stack, workers: int) -> None:
    """Kill one of two gateways under streams: its streams continue at the same address, the rest are not disturbed."""
    body = {"model": "demo-model", "prompt": PROMPT, "max_tokens": 450, "temperature": 0, "ignore_eos": True}
    gateway = Signals(stack, "gateway")
    engines = [Signals(stack, "worker", index + 1) for index in range(workers)]
    clients = [Asking(stack, {**body, "stream": True, "return_token_ids": True}, gateway) for _ in range(8)]
    for client in clients:
        client.start()
    by = time.monotonic() + 60
    # More than one gateway has, each with tokens and none computed whole: stopped workers keep it so.
    while not are_open(clients, len(clients) // 2 + 1, engines) and time.monotonic() < by:
        time.sleep(0.01)
    gateway.kill()
    for engine in engines:
        engine.send("CONT")
        engine.end()
    for client in clients:
        client.join(120)
    streams = [stream for client in clients for stream in client.streams]
    for stream in streams:
        check(
            len(stream.tokens) == 450,
            "a stream holds every token once after its gateway died",
            (stream.error, len(stream.tokens)),
        )
        check(stream.tokens == streams[0].tokens, "every greedy stream says the same")
    resumed = sum(stream.resumed > 0 for stream in streams)
    check(0 < resumed < len(clients), "the streams of one gateway were resumed, the others were not", resumed)
    print(f"        streams resumed: {resumed} of {len(clients)} that were open, {len(streams)} in all")


def are_open(clients: Sequence[Asking], least: int, engines: Sequence[Signals]) -> bool:
    """Stop the workers, and say whether so many streams have tokens and wait for more; let the workers go on if not."""
    for engine in engines:
        engine.send("STOP")
    seen, now = -1, 0
    while seen != now:  # what is on its way still comes
        time.sleep(0.3)
        seen, now = now, sum(client.tokens for client in clients)
    if sum(client.is_open for client in clients) >= least:
        return True
    for engine in engines:
        engine.send("CONT")
    return False


def run_all(streams: Sequence[Resuming]) -> None:
    threads = [threading.Thread(target=stream.run, daemon=True) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)


class Asking(threading.Thread):
    """A client that begins a stream when its last one ends, until the gateway was killed.

    So a gateway dies under open streams however fast the stack is and however slowly its answers are read.
    """

    def __init__(self, stack: Stack, body: dict[str, Any], gateway: Signals) -> None:
        super().__init__(daemon=True)
        self.streams: list[Resuming] = []
        self._stack, self._body, self._gateway = stack, body, gateway

    @property
    def tokens(self) -> int:
        return sum(len(stream.tokens) for stream in self.streams)

    @property
    def is_open(self) -> bool:
        """Whether the stream has tokens and waits for more."""
        return bool(self.streams) and 0 < len(self.streams[-1].tokens) < self._body["max_tokens"]

    def run(self) -> None:
        while not self.streams or not self._gateway.killed:
            self.streams.append(Resuming(self._stack, self._body))
            self.streams[-1].run()


class Resuming:
    """A client that goes on with its stream at the same address when its connection breaks."""

    def __init__(self, stack: Stack, body: dict[str, Any]) -> None:
        self.tokens: list[int] = []
        self.resumed = 0
        self.error = ""
        self._stack, self._body = stack, body
        self._id = self._last = ""
        self._done = False

    def run(self) -> None:
        by = time.monotonic() + 60
        while not self._done and time.monotonic() < by:
            try:
                self._read()
            except (OSError, http.client.HTTPException, BrokenPromiseError, ValueError) as error:  # ... of half a line
                self.error = f"{type(error).__name__}: {error}"
                time.sleep(0.1)

    def _read(self) -> None:
        if self._id:
            self.resumed += 1
            path, headers = f"/v1/requests/{self._id}/stream", {"Last-Event-ID": self._last}
            status, response = self._stack.ask("GET", path, headers=headers)
        else:
            status, response = self._stack.ask("POST", "/v1/completions", self._body)
        check(status == 200, "a stream and its rest answer 200", response.read(300) if status != 200 else "")
        event_id = ""
        for line in response:
            if line.startswith(b"id: "):
                event_id = line[4:].strip().decode()
            elif line.strip() == b"data: [DONE]":
                self._done = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                check("error" not in event, "a stream holds no error", event)
                self._id, self._last = event["id"], event_id
                self.tokens += [token for choice in event["choices"] for token in choice.get("token_ids") or []]


def grpc_is_published(port: int) -> None:
    """Check that a gateway speaks HTTP/2 at the second front's port."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(PREFACE)
        frame = b""
        while len(frame) < 9 and (more := connection.recv(9 - len(frame))):
            frame += more
    check(len(frame) == 9 and frame[3] == SETTINGS, "the gRPC port answers as HTTP/2 does", frame)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--project", required=True, help="compose project name")
    parser.add_argument("--port", type=int, required=True, help="the published port")
    parser.add_argument("--grpc-port", type=int, required=True, help="that of the gRPC front")
    parser.add_argument("--workers", type=int, required=True, help="how many compose was told to run")
    parser.add_argument("--gateways", type=int, required=True)
    options = parser.parse_args()
    stack = Stack(options.project, options.port)
    try:
        key_is_known(stack)
        all_workers_are_used(stack, options.workers)
        all_gateways_are_used(stack, options.gateways)
        grpc_is_published(options.grpc_port)
        streams_survive_a_gateway(stack, options.workers)
    except (BrokenPromiseError, OSError, http.client.HTTPException, ValueError, KeyError) as error:
        print(f"smoke: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
