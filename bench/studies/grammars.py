"""The effect of one tenant's costly grammars on another tenant's time between tokens, on a running stack.

    python -m bench.studies.grammars --url URL --quiet-key KEY --other-key KEY

By hand, on an idle machine. The quiet tenant reads streams without a grammar (closed loop), while the other sends
either requests without a grammar, or each with a costly one: two ambiguous Lark grammars, a schema of 400 properties
that differ in every request, so that it is compiled each time, and a schema of 2,250. Spans alternate: plain, costly,
costly, plain. Writes bench/results/grammars.json; --name keeps several results side by side.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections import Counter
from typing import Any

import aiohttp
import numpy as np

from bench.result import RESULTS, provenance, write
from bench.serve.client import payloads

STREAMS, OUTPUT, OTHERS = 4, 100, 4
GOAL = 1.2
AMBIGUOUS = (
    "start: s\ns: s s | /[a-z ]/",
    "start: s\ns: s s | s s s | s s s s | /[a-z ]/",
)


def costly(number: int) -> dict[str, Any]:
    """Return the fields of the number-th costly request."""
    kind = number % 4
    if kind < len(AMBIGUOUS):
        return {"guided_grammar": AMBIGUOUS[kind]}
    names = [f"p{number}_{at}" if kind == 2 else f"p{at}" for at in range(400 if kind == 2 else 2250)]
    return {"guided_json": {"type": "object", "properties": {name: {"type": "integer"} for name in names}}}


class Load:
    """Sends requests of both tenants and notes the quiet one's gaps between tokens."""

    def __init__(self, session: aiohttp.ClientSession, options: argparse.Namespace, model: str) -> None:
        self._session, self._options, self._model = session, options, model
        self._numbers = itertools.count()

    async def span(self, is_costly: bool) -> tuple[list[float], Counter[int]]:
        """Return the quiet tenant's gaps in seconds, and the statuses of the other's answers."""
        end = time.monotonic() + self._options.span_s
        gaps: list[float] = []
        statuses: Counter[int] = Counter()
        quiet = [self._quiet(end, gaps) for _ in range(STREAMS)]
        await asyncio.gather(*quiet, *(self._other(end, is_costly, statuses) for _ in range(OTHERS)))
        return gaps, statuses

    async def _quiet(self, end: float, gaps: list[float]) -> None:
        while time.monotonic() < end:
            body = {"prompt": "def ", "max_tokens": OUTPUT, "ignore_eos": True, "stream": True}
            async with self._post(self._options.quiet_key, body) as answer:
                answer.raise_for_status()
                last = 0.0
                async for _ in payloads(answer.content):
                    now = time.monotonic()
                    if last:
                        gaps.append(now - last)
                    last = now

    async def _other(self, end: float, is_costly: bool, statuses: Counter[int]) -> None:
        while time.monotonic() < end:
            fields = costly(next(self._numbers)) if is_costly else {"ignore_eos": True}
            body = {"prompt": "x", "max_tokens": OUTPUT, "temperature": 1.0, **fields}
            async with self._post(self._options.other_key, body) as answer:
                statuses[answer.status] += 1
                await answer.read()

    def _post(self, key: str, body: dict[str, Any]) -> Any:
        headers = {"Authorization": f"Bearer {key}"}
        return self._session.post(
            f"{self._options.url}/v1/completions", json={"model": self._model, **body}, headers=headers
        )


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        headers = {"Authorization": f"Bearer {options.quiet_key}"}
        async with session.get(f"{options.url}/v1/models", headers=headers) as answer:
            model = (await answer.json())["data"][0]["id"]
        load = Load(session, options, model)
        await load.span(is_costly=False)  # warm
        spans = [await load.span(is_costly) for is_costly in (False, True, True, False) * options.rounds]
    rows = {"plain": spans[0::4] + spans[3::4], "costly": spans[1::4] + spans[2::4]}
    found = {name: _row(parts) for name, parts in rows.items()}
    return {"ratio_p99": round(found["costly"]["tbt_ms_p99"] / found["plain"]["tbt_ms_p99"], 2), "goal": GOAL, **found}


def _row(parts: list[tuple[list[float], Counter[int]]]) -> dict[str, Any]:
    gaps = np.concatenate([gaps for gaps, _ in parts]) * 1e3
    statuses = sum((counted for _, counted in parts), Counter[int]())
    p50, p99 = np.percentile(gaps, [50, 99])
    return {
        "tbt_ms_p50": round(p50, 2),
        "tbt_ms_p99": round(p99, 2),
        "tbt_ms_max": round(float(gaps.max()), 1),
        "tokens": gaps.size,
        "p99_of_spans": [round(float(np.percentile(gaps, 99)) * 1e3, 2) for gaps, _ in parts],
        "other_answers": {str(status): count for status, count in sorted(statuses.items())},
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.grammars", description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--quiet-key", required=True)
    parser.add_argument("--other-key", required=True)
    parser.add_argument("--span-s", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--name", default="grammars", help="of the result")
    options = parser.parse_args()
    command = ["python", "-m", "bench.studies.grammars", "--span-s", str(options.span_s)]
    facts = provenance([*command, "--rounds", str(options.rounds), "--name", options.name])
    figures = asyncio.run(measure(options))
    write(RESULTS / f"{options.name}.json", facts | figures)
    print(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
