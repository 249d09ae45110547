"""Speculation beside that of other servers: each with its n-gram drafts and without, on answers that quote the prompt.

    python -m bench.peers.guesses [--rounds N] [--streams 1,8] [--only TEXT]

The model of the weights QUOTING of `bench/peers/model.py` goes on as its prompt did, so most drafts are right, and all
servers answer alike in float32. Both runs of a server are up at once and are asked in turn: without, with, with,
without; a request does not come twice. By hand, on an idle machine. Writes bench/results/guesses.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from bench.peers import install, model
from bench.peers.client import TIMEOUT_S, comparable, connected
from bench.peers.process import Running, StartError
from bench.peers.servers import SERVERS, Command, Server, request
from bench.result import RESULTS, provenance, write
from bench.serve.stats import median_interval

PROMPT, QUOTED_FROM, OUTPUT = 300, 50, 128
SETS = {1: 4, 8: 16, 32: 48}  # requests of a span, by how many run at a time
DRAFTS = {
    "orcinus float32": ("--speculate", "auto"),
    "vllm float32": (
        "--speculative-config",
        json.dumps({"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 3, "prompt_lookup_max": 8}),
    ),
    "llama.cpp F32": (
        "--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "16",
    ),
}  # fmt: skip
"""Words that turn each server's drafts on, behind any three tokens that came before; ours are on by default."""
WITHOUT = {"orcinus float32": ("--speculate", "off")}
Row = dict[str, Any]


def with_words(server: Server, words: Sequence[str]) -> Server:
    """Return the server with more words in its command."""

    def command(inner: Command, model: str, port: int, scratch: Path) -> list[str]:
        return [*inner(model, port, scratch), *words]

    return replace(server, command=partial(command, server.command))


def prompt(*key: int) -> str:
    """Return a text that ends as a passage of it begins."""
    words = model.prompt(PROMPT, *key).split(" ")
    return " ".join([*words, *words[QUOTED_FROM : QUOTED_FROM + 3]])


async def span(running: Running, texts: Sequence[str], streams: int) -> tuple[float, list[str]]:
    """Return the tokens a second with so many at a time, and the answers."""
    found: dict[int, str] = {}
    numbers = iter(range(len(texts)))

    async with connected(running) as (session, target):

        async def user() -> None:
            for number in numbers:
                body = orjson.dumps(request(running.server, texts[number], OUTPUT, stream=False))
                async with (
                    asyncio.timeout(TIMEOUT_S),
                    session.post(f"{target.url}/v1/completions", data=body) as reply,
                ):
                    answer = orjson.loads(await reply.read())
                    if reply.status != 200 or answer["usage"]["completion_tokens"] != OUTPUT:
                        raise RuntimeError(f"http {reply.status}: {str(answer)[:200]}")
                    found[number] = comparable(answer["choices"][0]["text"])

        begun = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(user())
        took = time.perf_counter() - begun
    return OUTPUT * len(texts) / took, [found[number] for number in range(len(texts))]


async def compare(plain: Running, drafting: Running, streams: int, rounds: int) -> Row:
    """Return speeds and ratios at so many streams, and how many answers were others with drafts."""
    size = SETS.get(streams, 2 * streams)
    ratios, speeds, differ = [], ([], []), 0  # type: tuple[list[float], tuple[list[float], list[float]], int]
    for round_ in range(rounds):
        found: list[list[tuple[float, list[str]]]] = [[], []]
        for half, order in enumerate(((plain, drafting), (drafting, plain))):
            texts = [prompt(streams, round_, half, number) for number in range(size)]
            for running in order:
                found[running is drafting].append(await span(running, texts, streams))
        without, drafted = (sum(rate for rate, _ in spans) / 2 for spans in found)
        ratios.append(drafted / without)
        speeds[0].append(without)
        speeds[1].append(drafted)
        for (_, expected), (_, answers) in zip(*found, strict=True):
            differ += sum(a != b for a, b in zip(expected, answers, strict=True))
    low, high = median_interval(ratios)
    return {
        "streams": streams, "rounds": rounds, "ratio": round(float(np.median(ratios)), 3),
        "ratio_low": round(low, 3), "ratio_high": round(high, 3),
        "tok_s_without": round(float(np.median(speeds[0])), 1), "tok_s_with": round(float(np.median(speeds[1])), 1),
        "answers": 2 * rounds * size, "differ": differ,
    }  # fmt: skip


def measure(server: Server, streams: Sequence[int], rounds: int) -> Row:
    """Start a server twice and compare; a failure is kept as `error`."""
    row: Row = {"name": server.name, "drafts": " ".join(DRAFTS[server.name]), "rows": [], "error": ""}
    logs = install.HOME / "logs"
    logs.mkdir(exist_ok=True)
    try:
        with ExitStack() as stack:
            plain, drafting = (
                stack.enter_context(
                    Running(with_words(server, words), model.QUOTING, logs / f"guesses {server.name} {at}.log")
                )
                for at, words in enumerate((WITHOUT.get(server.name, ()), DRAFTS[server.name]))
            )
            for running in (plain, drafting):
                asyncio.run(span(running, [prompt(0, number) for number in range(8)], 4))  # warm
            for count in streams:
                row["rows"].append(asyncio.run(compare(plain, drafting, count, rounds)))
                print(server.name, json.dumps(row["rows"][-1]), file=sys.stderr, flush=True)
    except (StartError, RuntimeError, OSError, ExceptionGroup) as error:
        row["error"] = str(error.exceptions[0] if isinstance(error, ExceptionGroup) else error)[:300]
        print(f"{server.name}: {row['error']}", file=sys.stderr, flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peers.guesses", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="of each server and number of streams (default: 10)")
    parser.add_argument("--streams", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8])
    parser.add_argument("--only", default="", help="only servers with this text in their name; writes no file")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds: {options.rounds} is less than 1")
    chosen = [server for server in SERVERS if server.name in DRAFTS and options.only in server.name]
    if not chosen:
        parser.error(f"--only: no server contains {options.only!r}")
    facts = provenance(["python", "-m", "bench.peers.guesses", *sys.argv[1:]])
    rows = [measure(server, options.streams, options.rounds) for server in chosen]
    result = {**facts, "model": model.QUOTING, "prompt": PROMPT, "output": OUTPUT, "servers": rows}
    if not options.only:
        write(RESULTS / "guesses.json", result)
    print(json.dumps(result))
    return 1 if any(row["error"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
