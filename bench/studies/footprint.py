"""Measure the cost of a local stack beside its model: memory of all processes, CPU a token outside the engine.

    python -m bench.studies.footprint [--model DIR] [--json]

Starts `orcinus up` in a run directory of its own. First closed loops at each of --streams: CPU time of each process a
token, and the client's gaps. Then --requests mixed requests (chat, completion, streaming, grammar, long prompts), after
which the memory of each process is read as PSS, in which pages that processes share count once in all.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import uvloop

from bench.peers import client
from bench.peers.process import Running
from bench.peers.servers import EXACT, OURS, Server
from bench.result import provenance
from services.launcher.rundir import RunDir
from shared.settings import DEMO_MODEL

KIB = 1 << 10
SAMPLE_S = 0.25
WORDS = (
    "return",
    "the",
    "sum",
    "of",
    "a",
    "list",
    "and",
    "print",
    "each",
    "line",
    "that",
    "is",
    "not",
    "empty",
    "None",
)
LONG_WORDS, SHORT_WORDS = 300, 20
TICKS = 1e6  # us in a second
WORKER = "worker-0"


@dataclass(frozen=True, slots=True)
class Process:
    """A process of the stack. Raises psutil.NoSuchProcess or OSError once it has ended."""

    name: str
    process: psutil.Process

    def pss_bytes(self) -> int:
        """Return its part of the memory that is resident; a page of n processes counts 1/n in each."""
        rollup = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text()
        return next(int(line.split()[1]) * KIB for line in rollup.splitlines() if line.startswith("Pss:"))

    def status_mib(self, name: str) -> float:
        """Return a size that the kernel says of the process: VmRSS, now resident; VmHWM, the most since its start."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return round(next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / KIB, 1)

    def cpu_s(self) -> dict[int, float]:
        """Return the seconds of each thread, to the nanosecond."""
        found = {}
        for thread in Path(f"/proc/{self.process.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                found[int(thread.name)] = int((thread / "schedstat").read_text().split()[0]) / 1e9
        return found


def processes(running: Running) -> list[Process]:
    """Return the processes of a stack, helpers under the name of the service that started them."""
    pids = RunDir(running.scratch / "run").pids()
    names = {pid: name for name, pid in pids.items()}
    found: list[Process] = []
    for process in running.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            name = names.get(process.pid) or ("launcher" if not found else _helper(process, names))
            found.append(Process(name, process))
    return found


def _helper(process: psutil.Process, names: dict[int, str]) -> str:
    module = next((word for word in process.cmdline() if "." in word and "/" not in word), process.name())
    parent = next((names[each.pid] for each in process.parents() if each.pid in names), "launcher")
    return f"{parent} {module.rpartition('.')[2]}"


def memory(running: Running) -> dict[str, int]:
    """Return bytes of PSS by process."""
    found: dict[str, int] = {}
    for one in processes(running):
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            found[one.name] = found.get(one.name, 0) + one.pss_bytes()
    return found


class Peak:
    """`with Peak(running) as peak:` reads the memory again and again; `peak.most` is the largest sum seen."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self.most: dict[str, int] = {}

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            now = memory(self._running)
            if sum(now.values()) > sum(self.most.values()):
                self.most = now


@contextlib.contextmanager
def stack(options: argparse.Namespace) -> Iterator[Running]:
    """Yield a stack that is ready, with no settings but the model and those given; it ends with the block."""

    def command(_model: str, port: int, scratch: Path) -> list[str]:
        words = [sys.executable, "-m", "services.cli", "up", "--stop-with-parent", "--model", str(options.model)]
        words += ["--served-model-name", "model", "--port", str(port), "--run-dir", str(scratch / "run")]
        return [*words, "--device", "cpu", *options.up]

    folder = Path(tempfile.mkdtemp(prefix="footprint-"))
    try:
        with Running(Server("stack", OURS, EXACT, "", "", "", command), "", folder / "up.log") as running:
            yield running
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def cost(running: Running, streams: int, total: int, round_: int) -> dict[str, Any]:
    """Return the CPU a token of each process and of the worker's threads beside the engine's, and the client's gaps.

    The engine's threads are the worker's busiest, as many as compute.
    """
    output = client.OUTPUT
    uvloop.run(client.closed_loop(running, client.WARM, round_, streams, streams, 16))
    members = processes(running)
    before = [one.cpu_s() for one in members]
    records = uvloop.run(client.closed_loop(running, client.CLOSED, round_, total, streams, output))
    spent = [
        sorted((s - was.get(thread, 0.0) for thread, s in one.cpu_s().items()), reverse=True)
        for one, was in zip(members, before, strict=True)
    ]
    figures = client.closed_figures(records)
    tokens = max(1, figures["output_tokens"])
    found: dict[str, float] = {}
    for one, each in zip(members, spent, strict=True):
        if one.name == WORKER:
            engine = sum(each[: psutil.cpu_count()])
            found["engine"] = engine * TICKS / tokens
            each = each[psutil.cpu_count() :]
        found[one.name] = found.get(one.name, 0.0) + sum(each) * TICKS / tokens
    outside = sum(us for name, us in found.items() if name != "engine")
    return {
        "streams": streams,
        "output_tok_s": figures["output_tok_s"],
        "gap_ms": figures["tbt_ms"],
        "ttft_ms": figures["ttft_ms"],
        "events_per_token": round(figures["events"] / tokens, 4),
        "errors": figures["errors"],
        "cpu_us_per_token": {name: round(us, 1) for name, us in found.items()},
        "outside_us_per_token": round(outside, 1),
    }


def mixed(number: int, has_chat: bool) -> tuple[str, dict[str, Any]]:
    """Return path and body of the number-th of the mixed requests. has_chat: whether the model has a template."""
    rng = random.Random(number)
    kind = number % 5
    text = " ".join(rng.choices(WORDS, k=LONG_WORDS if kind == 4 else SHORT_WORDS))
    body: dict[str, Any] = {"model": "model", "max_tokens": rng.choice((8, 32, 64)), "stream": bool(kind % 2)}
    if kind == 2:
        properties = {f"field_{number % 7}": {"type": "integer"}, "other": {"type": "string", "maxLength": 8}}
        body["guided_json"] = {"type": "object", "properties": properties, "required": list(properties)}
    if kind == 0 and has_chat:
        return "chat/completions", {**body, "messages": [{"role": "user", "content": text}]}
    return "completions", {**body, "prompt": text}


async def mix(url: str, total: int, at_once: int) -> dict[str, int]:
    """Send the mixed requests, at_once at a time, and return how many answers had each status."""
    numbers, statuses = iter(range(total)), dict[str, int]()

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=client.TIMEOUT_S)) as session:

        async def send(number: int, has_chat: bool) -> int:
            path, body = mixed(number, has_chat)
            async with session.post(f"{url}/v1/{path}", json=body) as answer:
                await answer.read()
                return answer.status

        has_chat = await send(0, True) == 200

        async def user() -> None:
            for number in numbers:
                status = str(await send(number, has_chat))
                statuses[status] = statuses.get(status, 0) + 1

        await asyncio.gather(*(user() for _ in range(at_once)))
    return statuses


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one stack."""
    with stack(options) as running, Peak(running) as peak:
        ready = memory(running)
        found: dict[str, Any] = {"cost": []}
        for round_ in range(options.rounds):
            for streams in options.streams:
                _say(f"{streams} streams")
                total = client.REQUESTS.get(streams, 2 * streams)
                found["cost"].append(cost(running, streams, total, round_))
        if options.requests:
            _say(f"{options.requests} mixed requests")
            found["answers"] = uvloop.run(mix(running.url, options.requests, options.at_once))
        worker = next(one for one in processes(running) if one.name == WORKER)
        found["worker_resident_mib"] = {"at_most": worker.status_mib("VmHWM"), "after": worker.status_mib("VmRSS")}
        found["pss_mib"] = {"ready": _mib(ready), "after": _mib(memory(running)), "peak": _mib(peak.most)}
    return found


def _mib(found: dict[str, int]) -> dict[str, float]:
    rows = {name: round(size / 2**20, 1) for name, size in sorted(found.items())}
    return {**rows, "all": round(sum(found.values()) / 2**20, 1)}


def _say(text: str) -> None:
    print(f"{text} ...", file=sys.stderr)


def show(found: dict[str, Any]) -> None:
    """Print a row for each loop and each process."""
    for row in found["cost"]:
        each = ", ".join(f"{name} {us:g}" for name, us in row["cpu_us_per_token"].items() if us >= 1)
        print(
            f"{row['streams']} streams: {row['output_tok_s']} tokens/s, gap p50 {row['gap_ms']['p50']} p99 "
            f"{row['gap_ms']['p99']} ms, {row['events_per_token']} events a token; CPU us a token outside the engine "
            f"{row['outside_us_per_token']} ({each})"
        )
    resident = found["worker_resident_mib"]
    print(f"worker resident: {resident['after']} MiB, {resident['at_most']} at most since its start")
    after = found["pss_mib"]["after"]
    for name in after:
        print(f"{name:32} {after[name]:9.1f} MiB, {found['pss_mib']['peak'].get(name, 0.0):9.1f} at the peak")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.studies.footprint", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--requests", type=int, default=1000, help="mixed ones before the memory is read; 0 for none")
    parser.add_argument("--at-once", type=int, default=16, help="of these")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 32], help="of the loops that show the CPU time")
    parser.add_argument("--rounds", type=int, default=1, help="of these loops")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("up", nargs="*", help="more arguments of `orcinus up`, after --")
    options = parser.parse_args(argv)
    given = sys.argv[1:] if argv is None else list(argv)
    facts = provenance(["python", "-m", "bench.studies.footprint", *given])
    found = measure(options)
    if options.json:
        print(json.dumps({"bench": "footprint", **facts, **found}, indent=1))
    else:
        show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
