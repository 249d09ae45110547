"""`python -m bench.peers.kill`: what clients see when a process of the server is killed under load.

STREAMS greedy completions run at once. When two fifths of their tokens have come, one process gets SIGKILL: of a peer
the engine's, of ours each of worker, scheduler, gateway and Redis in turn. A server without a supervisor of its own is
started again at once by the same command at the same address, as an init system would. Clients do not try again.
Answers are compared with those of the same server without a fault, and two runs without a fault with each other.

Exit codes: 0 measured, 1 a case failed or a peer is not installed, 2 wrong use.

Writes bench/results/kill.json, the table of docs/peers.md and docs/img/kill.png.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil
import uvloop

from bench import render
from bench.peers import install, model, plots
from bench.peers.process import Running, StartError
from bench.peers.servers import EXACT, OURS, SERVERS, Server, request
from bench.result import RESULTS, ROOT, provenance, write
from bench.serve.client import SseLines

CHART = ROOT / "docs" / "img" / "kill.png"
STREAMS, PROMPT, OUTPUT = 64, 64, 192
MODEL = "llama-30m"
KILL_AT = 0.4  # of all tokens have come
PROBE_EVERY_S = 0.25
LIMIT_S = 180.0
"""Of one run of the streams, and of the wait for a first token after the fault."""
KEY = 9  # first number of the prompts' keys; bench/peers/client.py has the others
OUR_PARTS = ("worker", "scheduler", "gateway", "redis")

Row = dict[str, Any]


@dataclass(slots=True)
class Stream:
    """One client: what it has, and how its stream ended. `error` is "" after a [DONE]."""

    number: int
    text: str = ""
    events: int = 0
    request_id: str = ""
    event_id: str = ""
    last_s: float = 0.0
    longest_gap_s: float = 0.0
    error: str = ""


@dataclass(slots=True)
class Load:
    """All clients of one run; `reached` is set at KILL_AT of their events."""

    server: Server
    url: str
    session: aiohttp.ClientSession
    streams: list[Stream] = field(default_factory=lambda: [Stream(number) for number in range(STREAMS)])
    events: int = 0
    reached: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> list[Stream]:
        """Send everything at once and read to the end."""
        await asyncio.gather(*(self._one(stream) for stream in self.streams))
        return self.streams

    async def _one(self, stream: Stream) -> None:
        body = request(self.server, model.prompt(PROMPT, KEY, stream.number), OUTPUT, stream=True)
        try:
            async with (
                asyncio.timeout(LIMIT_S),
                self.session.post(f"{self.url}/v1/completions", data=orjson.dumps(body)) as reply,
            ):
                await self.read(stream, reply)
        except (TimeoutError, aiohttp.ClientError, ConnectionError, ValueError) as error:
            stream.error = f"{type(error).__name__}: {error}"[:200]

    async def read(self, stream: Stream, reply: aiohttp.ClientResponse) -> None:
        """Read one answer into `stream`. Raises what breaks it off."""
        if reply.status != 200:
            raise ConnectionError(f"http {reply.status}: {(await reply.text())[:150]}")
        stream.request_id = reply.headers.get("x-orcinus-request", stream.request_id)
        lines, done = SseLines(), False
        async for chunk in reply.content.iter_any():
            for line in chunk.split(b"\n"):
                if line.startswith(b"id:"):
                    stream.event_id = line[3:].strip().decode()
            for data in lines.feed(chunk):
                done = done or data == b"[DONE]"
                if data != b"[DONE]":
                    self._note(stream, orjson.loads(data))
        if not done:
            raise ConnectionError(f"the stream ended after {stream.events} events without [DONE]")

    def _note(self, stream: Stream, event: Any) -> None:
        if event.get("error"):
            raise ConnectionError(f"error event: {event['error']}"[:150])
        now = time.monotonic()
        for choice in event.get("choices") or ():
            stream.text += choice.get("text") or ""
            stream.events += 1
            self.events += 1
            if stream.last_s:
                stream.longest_gap_s = max(stream.longest_gap_s, now - stream.last_s)
            stream.last_s = now
        if self.events >= KILL_AT * STREAMS * OUTPUT:
            self.reached.set()

    async def go_on(self) -> None:
        """Resume each broken stream that has a request id: that of Orcinus (docs/api.md, "Going on with a stream")."""
        for stream in self.streams:
            if stream.error and stream.request_id:
                url = f"{self.url}/v1/requests/{stream.request_id}/stream"
                headers = {"Last-Event-ID": stream.event_id} if stream.event_id else {}
                try:
                    async with asyncio.timeout(LIMIT_S), self.session.get(url, headers=headers) as reply:
                        await self.read(stream, reply)
                    stream.error = ""
                except (TimeoutError, aiohttp.ClientError, ConnectionError, ValueError) as error:
                    stream.error += f"; going on: {error}"[:200]


def connected() -> aiohttp.ClientSession:
    """Return a session that uses every connection once."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers={"Content-Type": "application/json"}, read_bufsize=2**20
    )


async def undisturbed(running: Running) -> list[str]:
    """Return the texts of all streams. Raises RuntimeError if one of them fails."""
    async with connected() as session:
        streams = await Load(running.server, running.url, session).run()
    if broken := [stream.error for stream in streams if stream.error]:
        raise RuntimeError(f"{len(broken)} of {STREAMS} streams failed without a fault: {broken[0]}")
    return [stream.text for stream in streams]


def victim(running: Running, part: str) -> int:
    """Return the pid of the process that is killed. Raises RuntimeError when there is none."""
    if running.server.peer == OURS:
        pids = json.loads((running.scratch / "run" / "processes.json").read_text())
        if found := [pid for name, pid in pids.items() if name.startswith(part)]:
            return int(found[0])
        raise RuntimeError(f"no process {part} among {sorted(pids)}")
    processes = running.processes()
    named = [one for one in processes if "EngineCore" in " ".join([one.name(), *one.cmdline()])]
    return int((named or processes[:1])[0].pid)


async def first_token(running: Running, session: aiohttp.ClientSession) -> float:
    """Return seconds from now until a new request is answered. Raises TimeoutError.

    A new client comes every PROBE_EVERY_S, since one may be held by a process that will never answer.
    """
    begin = time.monotonic()
    answered = asyncio.get_running_loop().create_future()

    async def probe(number: int) -> None:
        body = orjson.dumps(request(running.server, model.prompt(8, KEY, 1000 + number), 1, stream=False))
        try:
            async with session.post(f"{running.url}/v1/completions", data=body) as reply:
                await reply.read()
                if reply.status == 200 and not answered.done():
                    answered.set_result(time.monotonic() - begin)
        except (aiohttp.ClientError, ConnectionError):
            return

    probes: list[asyncio.Task[None]] = []
    try:
        async with asyncio.timeout(LIMIT_S):
            while not answered.done():
                probes.append(asyncio.create_task(probe(len(probes))))
                await asyncio.wait([answered], timeout=PROBE_EVERY_S)
        return float(answered.result())
    finally:
        for task in probes:
            task.cancel()
        await asyncio.gather(*probes, return_exceptions=True)


def supervise(running: Running) -> None:
    """Wait until the process that was started has ended, and start it again. Raises subprocess.TimeoutExpired."""
    running.wait_ended(LIMIT_S)
    running.start_again()


async def killed(running: Running, part: str, expected: Sequence[str]) -> Row:
    """Run the streams, kill one process on the way, and return what came of them."""
    async with connected() as session:
        load = Load(running.server, running.url, session)
        streaming = asyncio.create_task(load.run())
        async with asyncio.timeout(LIMIT_S):
            await load.reached.wait()
        pid, had = victim(running, part), sum(not stream.text for stream in load.streams)
        os.kill(pid, signal.SIGKILL)
        begin = time.monotonic()
        tasks = [] if running.server.peer == OURS else [asyncio.create_task(asyncio.to_thread(supervise, running))]
        after_s = await first_token(running, session)
        await asyncio.gather(streaming, *tasks)
        whole = [stream for stream in load.streams if not stream.error]
        right = sum(stream.text == expected[stream.number] for stream in whole)
        cut = [stream for stream in load.streams if stream.error]
        errors = sorted({stream.error for stream in cut})[:3]
        await load.go_on()
        resumed = [stream for stream in cut if not stream.error]
    return {
        "streams": STREAMS,
        "had_no_token": had,
        "right": right,
        "differ": len(whole) - right,
        "cut": len(cut),
        "resumed_right": sum(stream.text == expected[stream.number] for stream in resumed),
        "resumed_differ": sum(stream.text != expected[stream.number] for stream in resumed),
        "first_token_s": round(after_s, 2),
        "longest_gap_s": round(max((stream.longest_gap_s for stream in whole), default=0.0), 2),
        "errors": errors,
        "wall_s": round(time.monotonic() - begin, 1),
    }


def one(server: Server, part: str, log: Path) -> Row:
    """Start the server, run it twice without a fault and once with one, stop it."""
    with Running(server, MODEL, log) as running:
        expected = uvloop.run(undisturbed(running))
        again = uvloop.run(undisturbed(running))
        row = uvloop.run(killed(running, part, expected))
    return {"differ_without_fault": sum(a != b for a, b in zip(expected, again, strict=True)), **row}


def cases() -> list[tuple[Server, str]]:
    """Return the servers in float32 that are installed, ours once for each part."""
    found = [server for server in SERVERS if server.precision == EXACT and server.peer in ("vllm", "llama.cpp")]
    ours = next(server for server in SERVERS if server.name == "orcinus float32")
    return [*((server, "engine") for server in found), *((ours, part) for part in OUR_PARTS)]


def measure(rounds: int, chosen: Sequence[tuple[Server, str]], facts: Row) -> Row:
    """Return the result: for each case its rounds, or the error of the first that failed."""
    rows = []
    for server, part in chosen:
        missing = [name for name in server.recipes(MODEL) if not install.state(name).ok]
        row: Row = {"server": server.name, "peer": server.peer, "killed": part, "rounds": [], "error": ""}
        rows.append(row)
        if missing:
            row["error"] = f"{missing[0]}: {install.state(missing[0]).error}"
            continue
        log = install.HOME / "logs" / f"kill-{server.name}-{part}.log".replace(" ", "-")
        log.parent.mkdir(exist_ok=True)
        for number in range(rounds):
            print(
                f"{time.strftime('%H:%M:%S')} {server.name}, {part} killed, {number + 1} of {rounds}", file=sys.stderr
            )
            try:
                row["rounds"].append(one(server, part, log))
            except (StartError, RuntimeError, OSError, TimeoutError, psutil.Error, subprocess.TimeoutExpired) as error:
                row["error"] = f"{type(error).__name__}: {error}"[:300]
                break
            print(f"  {describe(row['rounds'][-1])}", file=sys.stderr, flush=True)
        row["first_token_s"] = statistics.median(r["first_token_s"] for r in row["rounds"]) if row["rounds"] else None
    settings = {"streams": STREAMS, "prompt_tokens": PROMPT, "output_tokens": OUTPUT, "rounds": rounds}
    return {"bench": "kill", **facts, "settings": settings, "rows": rows}


def describe(found: Row) -> str:
    text = f"{found['right']} right, {found['differ']} differ, {found['cut']} cut off"
    if found["cut"]:
        text += f" ({found['resumed_right'] + found['resumed_differ']} went on)"
    return (
        f"{text}; first token after {found['first_token_s']} s; {found['differ_without_fault']} differ without a fault"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peers.kill", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="of each case (default: 3)")
    parser.add_argument(
        "--only", default="", help="run only the cases with this text in server or part; write no files"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds: {options.rounds} is less than 1")
    chosen = [case for case in cases() if options.only in f"{case[0].name} {case[1]}"]
    if not chosen:
        parser.error(f"--only: no case contains {options.only!r}")
    if not install.state(MODEL).ok:
        parser.error(f"the model is not there; make it with `python -m bench.peers install {MODEL}`")
    result = measure(options.rounds, chosen, provenance(["python", "-m", "bench.peers.kill", *sys.argv[1:]]))
    if not options.only:
        write(RESULTS / "kill.json", result)
        render.write()
        plots.kill_chart(result, CHART)
    if options.json:
        print(json.dumps(result))
    else:
        print(render.section("kill", "table", {"kill": result}))
    return 1 if any(row["error"] for row in result["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
