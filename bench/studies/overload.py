"""The effect of a flooding tenant on another, on a running stack: section "Overload" of docs/operations.md.

    python -m bench.studies.overload --url URL --quiet-key KEY --flood-key KEY

By hand, on an idle machine, about three minutes with 60 s a part; writes bench/results/overload.json. What is served at
most (closed loop) is measured first. Then the quiet tenant sends 15 % of it (Poisson), once while the other sends ten
times as much, once while the other sends only what it was served in the flood, its fair share. Times count from when a
request was due.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from bench.result import RESULTS, ROOT, provenance, write
from bench.serve.client import payloads

RESULT = ROOT / "bench" / "results" / "overload.json"
PROMPT, OUTPUT, AT_ONCE, LOAD, FLOOD, GOAL = 200, 32, 64, 0.15, 10.0, 1.3
OK_STATUS, OK, BROKEN = 200, "200", "broken"


@dataclass
class Seen:
    """Of one tenant in one part: times to first token, and answers by status and code of the error; BROKEN where the
    connection ended.
    """

    ttft_s: list[float] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)

    def row(self, span_s: float) -> dict[str, Any]:
        p50, p99 = np.percentile(self.ttft_s, [50, 99]) * 1e3 if self.ttft_s else (0.0, 0.0)
        served = round(self.answers[OK] / span_s, 2)
        answers = dict(sorted(self.answers.items()))
        return {"ttft_ms_p50": round(p50, 1), "ttft_ms_p99": round(p99, 1), "served_rps": served, "answers": answers}


class Client:
    """Sends requests of random prompts, and notes what came."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, seed: int) -> None:
        self._session, self._url, self._model = session, url, model
        self._rng = np.random.default_rng(seed)

    async def send(self, key: str, due: float, seen: Seen) -> None:
        """Send one request and read it to its end."""
        try:
            await self._send(key, due, seen)
        except aiohttp.ClientError:
            seen.answers[BROKEN] += 1

    async def _send(self, key: str, due: float, seen: Seen) -> None:
        prompt = self._rng.integers(10, 200, PROMPT).tolist()
        body = {"model": self._model, "prompt": prompt, "max_tokens": OUTPUT, "ignore_eos": True, "stream": True}
        headers = {"Authorization": f"Bearer {key}"}
        async with self._session.post(f"{self._url}/v1/completions", json=body, headers=headers) as answer:
            if answer.status == OK_STATUS:
                async for _ in payloads(answer.content):
                    seen.ttft_s.append(time.monotonic() - due)
                    break
            end = await answer.read()
            code = "" if answer.status == OK_STATUS else f" {json.loads(end)['error']['code']}"
            seen.answers[f"{answer.status}{code}"] += 1

    async def open_loop(self, key: str, rps: float, span_s: float, seen: Seen) -> None:
        """Send Poisson arrivals for span_s, then wait until the last has ended."""
        begin, running = time.monotonic(), []
        for at in np.sort(self._rng.uniform(0, span_s, self._rng.poisson(rps * span_s))):
            await asyncio.sleep(max(0.0, begin + at - time.monotonic()))
            running.append(asyncio.create_task(self.send(key, begin + at, seen)))
        await asyncio.gather(*running)

    async def saturation_rps(self, key: str, span_s: float) -> float:
        """Return the highest served rate, with AT_ONCE requests in flight."""
        seen, end = Seen(), time.monotonic() + span_s

        async def one() -> None:
            while time.monotonic() < end:
                await self.send(key, time.monotonic(), seen)

        begin = time.monotonic()
        await asyncio.gather(*(one() for _ in range(AT_ONCE)))
        return seen.answers[OK] / (time.monotonic() - begin)


async def measure(options: argparse.Namespace, client: Client) -> dict[str, Any]:
    """Measure the three parts."""
    span_s = options.span_s

    async def both(flood_rps: float) -> tuple[Seen, Seen]:
        quiet, other = Seen(), Seen()
        sends: Callable[..., Awaitable[None]] = client.open_loop
        await asyncio.gather(
            sends(options.quiet_key, quiet_rps, span_s, quiet), sends(options.flood_key, flood_rps, span_s, other)
        )
        return quiet, other

    await client.saturation_rps(options.flood_key, 3.0)  # warm
    saturation = await client.saturation_rps(options.flood_key, span_s / 2)
    quiet_rps = LOAD * saturation
    begin = time.monotonic()
    quiet, flood = await both(FLOOD * quiet_rps)
    share_rps = flood.answers[OK] / (time.monotonic() - begin)
    held, fair = await both(share_rps)
    rows = {"quiet_in_flood": quiet, "flood": flood, "quiet_held": held, "held": fair}
    found = {name: seen.row(span_s) for name, seen in rows.items()}
    ratio = found["quiet_in_flood"]["ttft_ms_p99"] / found["quiet_held"]["ttft_ms_p99"]
    rates = {
        "saturation_rps": saturation,
        "quiet_rps": quiet_rps,
        "flood_rps": FLOOD * quiet_rps,
        "held_rps": share_rps,
    }
    return {"ratio_p99": round(ratio, 2), "goal": GOAL, **{k: round(v, 2) for k, v in rates.items()}, **found}


async def run(options: argparse.Namespace) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        headers = {"Authorization": f"Bearer {options.quiet_key}"}
        async with session.get(f"{options.url}/v1/models", headers=headers) as answer:
            model = (await answer.json())["data"][0]["id"]
        return await measure(options, Client(session, options.url, model, seed=1))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.overload", description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--quiet-key", required=True)
    parser.add_argument("--flood-key", required=True)
    parser.add_argument("--span-s", type=float, default=15.0)
    options = parser.parse_args()
    facts = provenance(["python", "-m", "bench.studies.overload", "--span-s", str(options.span_s)])
    begin = time.process_time(), time.monotonic()
    figures = asyncio.run(run(options))
    cpu = (time.process_time() - begin[0]) / (time.monotonic() - begin[1])
    write(RESULTS / "overload.json", facts | {"client_cpu": round(cpu, 2)} | figures)
    print(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
