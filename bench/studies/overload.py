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
from typing import Any

import numpy as np

from bench.result import RESULTS, provenance, write
from bench.studies.excess import Client, Sample, with_client

LOAD, FLOOD, GOAL = 0.15, 10.0, 1.3


async def open_loop(client: Client, key: str, rps: float, span_s: float) -> list[Sample]:
    """Send Poisson arrivals of one tenant for span_s, and return them when the last has ended."""
    begin, running = time.monotonic(), []
    for at in np.sort(client.rng.uniform(0, span_s, client.rng.poisson(rps * span_s))):
        await asyncio.sleep(max(0.0, begin + at - time.monotonic()))
        running.append(asyncio.create_task(client.send(Sample(begin + float(at), "normal", key))))
    return list(await asyncio.gather(*running))


def served(samples: list[Sample]) -> int:
    """Return the number of requests that were answered whole."""
    return sum(one.is_good for one in samples)


def row(samples: list[Sample], span_s: float) -> dict[str, Any]:
    """Return the figures of one tenant in one part."""
    times = [one.first - one.due for one in samples if one.first]
    p50, p99 = np.percentile(times, [50, 99]) * 1e3 if times else (0.0, 0.0)
    answers = Counter(
        f"{one.status if one.is_good or one.status != 200 else 'broken'} {one.code}".strip() for one in samples
    )
    return {
        "ttft_ms_p50": round(p50, 1), "ttft_ms_p99": round(p99, 1), "served_rps": round(served(samples) / span_s, 2),
        "answers": dict(sorted(answers.items())),
    }  # fmt: skip


async def measure(options: argparse.Namespace, client: Client) -> dict[str, Any]:
    """Measure the three parts."""
    span_s = options.span_s

    async def both(flood_rps: float) -> tuple[list[Sample], list[Sample]]:
        quiet = open_loop(client, options.quiet_key, quiet_rps, span_s)
        return await asyncio.gather(quiet, open_loop(client, options.flood_key, flood_rps, span_s))

    await client.saturate(3.0)  # warm
    saturation = await client.saturate(span_s / 2)
    quiet_rps = LOAD * saturation
    begin = time.monotonic()
    quiet, flood = await both(FLOOD * quiet_rps)
    share_rps = served(flood) / (time.monotonic() - begin)
    held, fair = await both(share_rps)
    rows = {"quiet_in_flood": quiet, "flood": flood, "quiet_held": held, "held": fair}
    found = {name: row(samples, span_s) for name, samples in rows.items()}
    ratio = found["quiet_in_flood"]["ttft_ms_p99"] / found["quiet_held"]["ttft_ms_p99"]
    rates = {
        "saturation_rps": saturation,
        "quiet_rps": quiet_rps,
        "flood_rps": FLOOD * quiet_rps,
        "held_rps": share_rps,
    }
    return {"ratio_p99": round(ratio, 2), "goal": GOAL, **{k: round(v, 2) for k, v in rates.items()}, **found}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.overload", description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--quiet-key", required=True)
    parser.add_argument("--flood-key", required=True)
    parser.add_argument("--span-s", type=float, default=15.0)
    options = parser.parse_args()
    facts = provenance(["python", "-m", "bench.studies.overload", "--span-s", str(options.span_s)])
    keys = [options.flood_key, options.quiet_key]
    figures = asyncio.run(with_client(options.url, keys, lambda client: measure(options, client)))
    write(RESULTS / "overload.json", facts | figures)
    print(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
