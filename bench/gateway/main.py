"""`orcinus bench gateway`: the token rate of one gateway process on one core.

A real gateway on a core of its own, a real Redis, requests that are enqueued and claimed as ever, and a publisher that
writes one iteration after another with one new token for each of the streams: an event of its own for every token, the
hardest case. Clients, publisher and Redis share a second core. Two cases: `saturation`, in which the publisher is
always a few iterations ahead, and `rate`, in which tokens come at a steady rate and their way to the client is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from bench.gateway.publisher import Publisher
from bench.gateway.stack import Core, Stack, running
from bench.gateway.streams import BrokenStreamError, Streams
from bench.result import provenance
from services.scheduler.core.types import Finish
from shared.command_line.arguments import Parser
from shared.errors import ConfigurationError
from shared.settings import DEMO_MODEL

COLUMNS = (
    "case", "tokens/s", "events/s", "CPU us a token", "wait p50, ms", "p99", "gateway ran", "in line", "beside it",
)  # fmt: skip


CASES = ("saturation", "rate")
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
PACKAGES = ("orcinus", "uvloop", "uvicorn", "redis", "hiredis", "protobuf")
GOALS = {"tokens_s": 20_000, "wait_p50_ms": 5.0}
AHEAD = 8
"""Iterations that may be published and not yet read, at saturation."""
WARM_S = 1.0
BEAT_S = 1.0
END_S = 60.0
MAX_IDLE = 0.10
MAX_LATE = 0.02
BOUNDS = {"clients": (1, 2000), "seconds": (0.5, 120), "rate": (100, 1_000_000)}


class WrongLimitError(RuntimeError):
    """Something else than the gateway was the limit, so the figures would not be its own."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Of one run of a case."""

    clients: int
    seconds: float
    rate: float  # tokens/s, of the case `rate`


@dataclass(frozen=True, slots=True)
class Mark:
    """The counters at one moment."""

    at: float
    tokens: int
    events: int
    gateway: Core
    own: Core
    redis: Core

    @classmethod
    def now(cls, stack: Stack, streams: Streams) -> Mark:
        cores = (Core.of(pid) for pid in (stack.gateway_pid, os.getpid(), stack.redis_pid))
        return cls(time.monotonic(), streams.tokens, streams.events, *cores)


class Run:
    """One case at one endpoint."""

    def __init__(self, stack: Stack, publisher: Publisher, setup: Setup) -> None:
        self._stack, self._publisher, self._setup = stack, publisher, setup

    def measure(self, case: str, endpoint: str, decode: Callable[[list[int]], str]) -> dict[str, Any]:
        """Return the figures of the case. Raises WrongLimitError, BrokenStreamError."""
        count, publisher = self._setup.clients, self._publisher
        bodies = [_body(endpoint, self._stack.keys.model) for _ in range(count)]
        streams = Streams(self._stack.port, bodies, PATHS[endpoint])
        try:
            publisher.claim(count, lambda: streams.poll(0.0))  # reports refused requests
            late_s: list[float] = []
            drive = self._saturate if case == "saturation" else self._at_rate
            drive(streams, WARM_S, late_s)
            late_s.clear()
            begin = Mark.now(self._stack, streams)
            streams.published_s = publisher.published_s if case == "rate" else None
            drive(streams, self._setup.seconds, late_s)
            end = Mark.now(self._stack, streams)
            streams.published_s = None
            self._finish(streams, decode)
        finally:
            streams.close()
        figures = self._figures(case, endpoint, begin, end)
        if case == "rate":
            figures |= _waits(streams.waits_s, late_s, count / self._setup.rate)
        check(figures)
        return figures

    def _saturate(self, streams: Streams, seconds: float, _late_s: list[float]) -> None:
        """Publish iterations so that the gateway always has one."""
        count, publisher, end = self._setup.clients, self._publisher, time.monotonic() + seconds
        beat = time.monotonic()
        while (now := time.monotonic()) < end:
            while len(publisher.published_s) * count - streams.tokens < AHEAD * count:
                publisher.step()
            streams.poll(0.1)
            if now >= beat:
                publisher.beat()
                beat = now + BEAT_S

    def _at_rate(self, streams: Streams, seconds: float, late_s: list[float]) -> None:
        """Publish an iteration every clients / rate seconds and read in between. late_s: delay of each start."""
        period, begin = self._setup.clients / self._setup.rate, time.monotonic()
        beat = begin
        for due in begin + period * np.arange(int(seconds / period)):
            while (rest := due - time.monotonic()) > 0:
                streams.poll(rest)
            late_s.append(-rest)
            self._publisher.step()
            if due >= beat:
                self._publisher.beat()
                beat = due + BEAT_S

    def _finish(self, streams: Streams, decode: Callable[[list[int]], str]) -> None:
        """End all requests and check that every token arrived. Raises BrokenStreamError."""
        publisher, end = self._publisher, time.monotonic() + END_S
        publisher.step(Finish.LENGTH)
        while streams.ended < self._setup.clients:
            streams.poll(0.5)
            if time.monotonic() > end:
                raise BrokenStreamError(f"{streams.ended} of {self._setup.clients} streams had ended after {END_S} s")
        found = re.search(rb"\nid: ([^\n]*):\d+\n", streams.kept)
        if found is None:
            raise BrokenStreamError("the first stream had no event")
        count = len(publisher.published_s)
        expected = decode(publisher.tokens_of(publisher.row_of(found[1].decode()), count))
        if streams.text() != expected:
            raise BrokenStreamError(f"the text of a stream is not that of its {count} tokens")

    def _figures(self, case: str, endpoint: str, begin: Mark, end: Mark) -> dict[str, Any]:
        wall_s, tokens = end.at - begin.at, end.tokens - begin.tokens
        gateway, own, redis = (
            after.since(before)
            for before, after in ((begin.gateway, end.gateway), (begin.own, end.own), (begin.redis, end.redis))
        )
        return {
            "case": case,
            "endpoint": endpoint,
            "clients": self._setup.clients,
            "seconds": round(wall_s, 2),
            "tokens_s": round(tokens / wall_s),
            "events_s": round((end.events - begin.events) / wall_s),
            "cpu_us_per_token": round(1e6 * gateway.ran_s / max(1, tokens), 2),
            "gateway_ran": round(gateway.ran_s / wall_s, 3),
            "gateway_waited": round(gateway.waited_s / wall_s, 3),
            "client_and_publisher_ran": round(own.ran_s / wall_s, 3),
            "client_and_publisher_waited": round(own.waited_s / wall_s, 3),
            "redis_ran": round(redis.ran_s / wall_s, 3),
        }


def _waits(waits_s: list[float], late_s: list[float], period_s: float) -> dict[str, Any]:
    """Return the delays of tokens in the case `rate`, from publishing to reading."""
    p50, p99 = np.percentile(waits_s or [0.0], [50, 99]) * 1e3
    late = sum(late > period_s / 2 for late in late_s) / max(1, len(late_s))
    return {"wait_p50_ms": round(p50, 2), "wait_p99_ms": round(p99, 2), "late_iterations": round(late, 4)}


def check(figures: dict[str, Any]) -> None:
    """Raise WrongLimitError if the bench and not the gateway limits the figures."""
    beside = figures["client_and_publisher_ran"] + figures["client_and_publisher_waited"]
    context = f"clients and publisher used or waited for {beside:.0%} of their core, Redis {figures['redis_ran']:.0%}"
    idle = 1 - figures["gateway_ran"] - figures["gateway_waited"]
    if figures["case"] == "saturation" and idle > MAX_IDLE:
        raise WrongLimitError(f"at {figures['tokens_s']:,} tokens/s the gateway was idle for {idle:.0%}; {context}")
    if figures.get("late_iterations", 0.0) > MAX_LATE:
        late = figures["late_iterations"]
        raise WrongLimitError(f"{late:.0%} of the iterations were published half a period late or more; {context}")


def _body(endpoint: str, model: str) -> bytes:
    asks = {"prompt": "The"} if endpoint == "completions" else {"messages": [{"role": "user", "content": "The"}]}
    return orjson.dumps({"model": model, **asks, "max_tokens": 500_000, "stream": True})


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all cases in turn. Raises ConfigurationError, WrongLimitError, BrokenStreamError, TimeoutError."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    text = tokenizer.encode((DEMO_MODEL / "LICENSE.python.txt").read_text(), add_special_tokens=False).ids
    setup = Setup(options.clients, options.seconds, options.rate)
    found = []
    with (
        tempfile.TemporaryDirectory(prefix="orcinus-bench-") as directory,
        running(Path(directory), DEMO_MODEL) as stack,
    ):
        publisher = Publisher(stack.client, stack.keys, text)
        stack.wait_ready()
        run = Run(stack, publisher, setup)
        for case in options.cases:
            for endpoint in options.endpoints:
                _say(f"{case}, {endpoint}, {setup.clients} streams")
                found.append(run.measure(case, endpoint, tokenizer.decode))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("orcinus bench gateway", "Measure tokens per second and delay of one gateway process on one core.")
    parser.add_argument("--cases", type=_some_of(CASES), default=CASES, help=f"some of {','.join(CASES)}")
    parser.add_argument("--endpoints", type=_some_of(PATHS), default=tuple(PATHS), help=f"some of {','.join(PATHS)}")
    parser.add_argument("--clients", type=int, default=256, help="streams at once")
    parser.add_argument("--seconds", type=float, default=10.0, help="that each case is measured for")
    parser.add_argument("--rate", type=float, default=10_000, help="tokens/s of all streams together, of case rate")
    parser.add_argument("--prediction", default="", help="kept in the JSON: what was expected beforehand")
    parser.add_argument("--note", default="", help="kept in the JSON: what else the machine was doing")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        options = parser.parse_args(given)
    except SystemExit as stop:
        return 0 if stop.code == 0 else 2
    for name, (low, high) in BOUNDS.items():
        if not low <= (value := getattr(options, name)) <= high:
            print(f"error: --{name} is {low:,} to {high:,}, not {str(value)[:40]}", file=sys.stderr)
            return 2
    about = {
        "bench": "gateway",
        **provenance(
            ["orcinus", "bench", "gateway", *given], "orcinus", "uvloop", "uvicorn", "redis", "hiredis", "protobuf"
        ),
        "goals": GOALS,
        "prediction": options.prediction,
        "note": options.note,
    }
    try:
        results = measure(options)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (WrongLimitError, BrokenStreamError, TimeoutError) as error:
        print(f"error: nothing is reported: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps({**about, "results": results}, indent=1))
    else:
        show(results, GOALS)
    return 0


def _some_of(known: Sequence[str] | dict[str, str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        if wrong := sorted(set(text.split(",")) - set(known)):
            raise argparse.ArgumentTypeError(f"no {wrong[0][:40]!r}; there are {', '.join(known)}")
        return tuple(text.split(","))

    return parse


def _say(text: str) -> None:
    print(f"{text} ...", file=sys.stderr)


def show(results: Sequence[Mapping[str, Any]], goals: Mapping[str, float]) -> None:
    """Print one row for each case; shares are of one core."""
    console = Console()
    table = Table(title=f"One gateway process on one core, {results[0]['clients']} streams")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "case" else "right")
    for line in results:
        waits = (f"{line[name]:.2f}" if name in line else "" for name in ("wait_p50_ms", "wait_p99_ms"))
        beside = line["client_and_publisher_ran"] + line["redis_ran"]
        table.add_row(
            f"{line['case']}, {line['endpoint']}", f"{line['tokens_s']:,}", f"{line['events_s']:,}",
            f"{line['cpu_us_per_token']:.1f}", *waits, f"{line['gateway_ran']:.0%}", f"{line['gateway_waited']:.0%}",
            f"{beside:.0%}",
        )  # fmt: skip
    console.print(table)
    console.print("Shares of one core: in line, when it could have run and another process did; beside it, the bench.")
    console.print(
        f"Goals: {goals['tokens_s']:,} tokens/s, and a p50 of {goals['wait_p50_ms']:g} ms at 10,000 tokens/s."
    )


if __name__ == "__main__":
    sys.exit(main())
