"""A running stack under more than it can serve, with classes, tenants and deadlines: "Overload" of docs/operations.md.

    python -m bench.studies.excess --url URL --key KEY --key KEY

By hand; writes bench/results/excess.json. First the capacity (closed loop) and the TTFT of a `realtime` request alone.
Then Poisson arrivals at --factor times the capacity for --span-s, of all classes and keys, a third of them with a
deadline. Then they come at 0.9 times the capacity: refused requests with a Retry-After that has passed, once each and
the oldest first, else new ones. Times count from when a request was due.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson

from bench.result import RESULTS, provenance, write
from bench.serve.client import payloads
from shared.processes.heap import settle

PROMPT, OUTPUT, AT_ONCE, DEADLINE_MS, AFTER = 200, 32, 64, 5000, 0.9
HORIZON_S, LATE_S = 60, 10
"""A Retry-After from here on promises no place; a retry comes at most so late."""
SHARES = {"realtime": 0.1, "high": 0.2, "normal": 0.4, "low": 0.3}


@dataclass(slots=True)
class Sample:
    """One request and its answer. Times are of time.monotonic()."""

    due: float
    priority: str = "realtime"
    key: str = ""
    deadline_ms: int = 0
    seed: int = 0  # of its prompt: a retry has the same
    is_retry: bool = False
    has_place: bool = False  # of a retry: the Retry-After before it was below HORIZON_S
    status: int = 0  # 0: no answer
    code: str = ""  # of a refusal
    retry_after_s: float = 0.0
    sent: float = 0.0
    first: float = 0.0
    end: float = 0.0
    finish: str = ""

    @property
    def is_good(self) -> bool:
        """Whether all tokens came."""
        return self.finish == "length"

    @property
    def late_s(self) -> float:
        """Return the seconds by which the answer came after the deadline; negative when it kept it."""
        return self.end - self.due - self.deadline_ms / 1000


@dataclass
class Client:
    """Send requests of random prompts and note their answers."""

    session: aiohttp.ClientSession
    url: str
    model: str
    keys: list[str]
    rng: np.random.Generator
    samples: list[Sample] = field(default_factory=list)

    async def send(self, one: Sample) -> Sample:
        """Send one request and read it to its end."""
        self.samples.append(one)
        one.sent = time.monotonic()
        one.seed = one.seed or int(self.rng.integers(1, 1 << 62))
        prompt = np.random.default_rng(one.seed).integers(10, 200, PROMPT).tolist()
        body: dict[str, Any] = {"model": self.model, "prompt": prompt}
        body |= {"max_tokens": OUTPUT, "ignore_eos": True, "stream": True, "priority": one.priority}
        if one.deadline_ms:
            body["deadline_ms"] = one.deadline_ms
        headers = {"Authorization": f"Bearer {one.key or self.keys[0]}"}
        try:
            async with self.session.post(f"{self.url}/v1/completions", json=body, headers=headers) as answer:
                one.status = answer.status
                if answer.status != 200:
                    one.code = (await answer.json())["error"]["code"]
                    one.retry_after_s = float(answer.headers.get("Retry-After", 0))
                else:
                    await self._read(answer, one)
        except (aiohttp.ClientError, TimeoutError) as error:
            one.code = type(error).__name__
        one.end = time.monotonic()
        return one

    async def _read(self, answer: aiohttp.ClientResponse, one: Sample) -> None:
        async for payload in payloads(answer.content):
            event = orjson.loads(payload)
            if "error" in event:
                one.code = event["error"]["code"]
            elif event["choices"]:
                one.first = one.first or (time.monotonic() if event["choices"][0]["text"] else 0.0)
                one.finish = event["choices"][0]["finish_reason"] or ""

    async def saturate(self, span_s: float) -> float:
        """Return the requests served a second with AT_ONCE in flight."""
        begin, served = time.monotonic(), 0

        async def loop() -> None:
            nonlocal served
            while time.monotonic() < begin + span_s:
                one = await self.send(Sample(time.monotonic(), "normal"))
                served += one.is_good

        await asyncio.gather(*(loop() for _ in range(AT_ONCE)))
        return served / (time.monotonic() - begin)

    async def alone(self, count: int) -> list[Sample]:
        """Send `realtime` requests one after another."""
        return [await self.send(Sample(time.monotonic())) for _ in range(count)]

    def arrivals(self, begin: float, rps: float, span_s: float) -> list[Sample]:
        """Return Poisson arrivals of the mix, in order. begin: 0, or the end of an earlier span."""
        found = []
        for at in np.sort(self.rng.uniform(0, span_s, self.rng.poisson(rps * span_s))):
            priority = str(self.rng.choice(list(SHARES), p=list(SHARES.values())))
            deadline_ms = DEADLINE_MS if self.rng.random() < 1 / 3 else 0
            found.append(Sample(begin + float(at), priority, str(self.rng.choice(self.keys)), deadline_ms))
        return found

    async def overload(self, rps: float, capacity_rps: float, span_s: float, after_s: float) -> float:
        """Send `rps` for span_s, then 0.9 times the capacity for after_s, retries among them. Return the time of the
        change.
        """
        arrivals = [*self.arrivals(0.0, rps, span_s), *self.arrivals(span_s, AFTER * capacity_rps, after_s)]
        begin = time.monotonic() + 0.5  # not before the arrivals: to draw them takes seconds
        change = begin + span_s
        running: list[asyncio.Task[None]] = []
        again: list[tuple[float, int, Sample]] = []  # when, a number, what was refused
        numbers = itertools.count()

        async def at(one: Sample) -> None:
            await self.send(one)
            if one.status in (429, 503) and not one.is_retry:
                heapq.heappush(again, (one.end + one.retry_after_s, next(numbers), one))

        for one in arrivals:
            one.due += begin
            await asyncio.sleep(max(0.0, one.due - time.monotonic()))
            while again and again[0][0] < max(change, one.due - LATE_S):  # not sent: the load would be another
                heapq.heappop(again)
            if one.due >= change and again and again[0][0] <= one.due:
                _, _, old = heapq.heappop(again)
                has_place = old.retry_after_s < HORIZON_S
                one = Sample(one.due, old.priority, old.key, old.deadline_ms, old.seed, True, has_place)
            running.append(asyncio.create_task(at(one)))
        await asyncio.gather(*running)
        return change


def percentiles(values: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(values, [50, 99]) if values else (0.0, 0.0)
    return {"p50": round(float(p50), 3), "p99": round(float(p99), 3)}


def figures(samples: list[Sample], span_s: float) -> dict[str, Any]:
    """Return the figures of the requests that were due in span_s."""
    answers = Counter(str(one.status) if one.status in (0, 200) else f"{one.status} {one.code}" for one in samples)
    limited = [one for one in samples if one.deadline_ms]
    return {
        "requests": len(samples),
        "answers": dict(sorted(answers.items())),
        "finishes": dict(Counter(one.finish or one.code for one in samples if one.status == 200)),
        "sent_after_s": percentiles([one.sent - one.due for one in samples]),
        "goodput_rps": round(sum(one.is_good for one in samples) / span_s, 2),
        "ttft_s": percentiles([one.first - one.due for one in samples if one.first]),
        "refused_after_s": percentiles([one.end - one.due for one in samples if one.status in (429, 503)]),
        "retry_after_s": percentiles([one.retry_after_s for one in samples if one.retry_after_s]),
        "with_deadline": len(limited),
        "late_by_1s": sum(bool(one.late_s > 1) for one in limited),
        "latest_s": round(float(max((one.late_s for one in limited), default=0.0)), 2),
    }


def fates(retries: list[Sample]) -> dict[str, Any]:
    return {
        "count": len(retries),
        "admitted": sum(one.status == 200 for one in retries),
        "refused": dict(Counter(one.code for one in retries if one.status != 200)),
    }


def by_class(samples: list[Sample], span_s: float) -> dict[str, Any]:
    return {name: figures([one for one in samples if one.priority == name], span_s) for name in SHARES}


async def measure(options: argparse.Namespace, client: Client) -> dict[str, Any]:
    """Measure all parts."""
    await client.saturate(3.0)  # warm
    capacity = await client.saturate(options.span_s / 4)
    alone = await client.alone(50)
    client.samples.clear()
    change = await client.overload(options.factor * capacity, capacity, options.span_s, options.after_s)
    loaded = [one for one in client.samples if one.due < change]
    after = [one for one in client.samples if one.due >= change and not one.is_retry]
    retries = [one for one in client.samples if one.is_retry]
    # What ends while the overload lasts is compared with the capacity: arrivals are served later, too.
    served = sum(one.is_good and change - options.span_s <= one.end < change for one in client.samples)
    return {
        "capacity_rps": round(capacity, 2),
        "offered_rps": round(options.factor * capacity, 2),
        "served_rps": round(served / options.span_s, 2),
        "realtime_alone_ttft_s": percentiles([one.first - one.due for one in alone if one.first]),
        "overload": {"all": figures(loaded, options.span_s), **by_class(loaded, options.span_s)},
        "after": {
            "all": figures(after, options.after_s),
            "retries_with_place": fates([one for one in retries if one.has_place]),
            "retries_beyond": fates([one for one in retries if not one.has_place]),
        },
    }


async def with_client(
    url: str, keys: list[str], measure: Callable[[Client], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    """Return what `measure` finds, and the share of a core that this process took."""
    begin = time.process_time(), time.monotonic()
    connector, timeout = aiohttp.TCPConnector(limit=0, force_close=True), aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        async with session.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {keys[0]}"}) as answer:
            model = (await answer.json())["data"][0]["id"]
        settle()  # else full collections of Python's garbage stop this client, by the end for half a second each
        found = await measure(Client(session, url, model, keys, np.random.default_rng(1)))
    cpu = (time.process_time() - begin[0]) / (time.monotonic() - begin[1])
    return {"client_cpu": round(cpu, 2), **found}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.excess", description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", action="append", required=True, help="of a tenant; may be repeated")
    parser.add_argument("--factor", type=float, default=3.0, help="of the capacity")
    parser.add_argument("--span-s", type=float, default=60.0)
    parser.add_argument("--after-s", type=float, default=60.0)
    parser.add_argument("--note", default="", help="kept in the JSON: what else the machine was doing")
    parser.add_argument("--output", type=Path, default=RESULTS / "excess.json")
    options = parser.parse_args()
    command = ["python", "-m", "bench.studies.excess", "--factor", str(options.factor)]
    facts = provenance([*command, "--span-s", str(options.span_s), "--after-s", str(options.after_s)])
    found = asyncio.run(with_client(options.url, options.key, lambda client: measure(options, client)))
    write(options.output, facts | {"note": options.note} | found)
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
