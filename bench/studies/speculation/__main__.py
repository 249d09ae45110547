"""The speed of requests with guessed tokens beside the same ones without, on real texts.

    python -m bench.studies.speculation --old LIB --new LIB [--model DIR] [--rounds 10] [--streams 1,8,32]

By hand, on an idle machine. A stack of its own runs the model, but each token drawn is that of a recorded text
(`texts.py`), so that what is measured is the traffic of a good model. LIB: the standard library of two versions of
Python. Each round takes two sets of texts: without, with, with, without. Requests with drafts and those without come
from two tenants, so neither finds prompts of the other in the cache. When the texts are used up they begin again, for
two further tenants: those have no earlier output to guess from. Prompts and outputs are cut to --prompt and --output
tokens. Writes bench/results/speculation.json; --name keeps several results.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from tokenizers import Tokenizer

from bench.local import stack
from bench.result import RESULTS, ROOT, provenance, write
from bench.serve.stats import median_interval
from bench.studies.speculation import texts

SEED = 20261124
KINDS = ("edits", "json", "schema", "quotes", "prose")
FORMAT = {"type": "json_schema", "json_schema": {"name": "record", "schema": texts.SCHEMA}}
OPEN: dict[str, Any] = {"ignore_eos": True}
BOUND: dict[str, Any] = {"response_format": FORMAT}
"""Fields of requests without a grammar, and with one."""
HOOK = Path(__file__).parent / "hook"
SETS = {1: 3, 8: 10, 32: 34}  # texts of a set, by streams
TENANTS = 512  # two for each time that the texts of a kind begin again


def pairs(kind: str, options: argparse.Namespace) -> Iterator[texts.Pair]:
    """Return the texts of a kind."""
    if kind == "edits":
        return texts.edits(options.old, options.new)
    if kind in ("json", "schema"):
        return texts.records()
    return texts.quotes(ROOT / "docs", SEED) if kind == "quotes" else texts.prose(ROOT / "docs")


def recorded(options: argparse.Namespace) -> tuple[list[list[int]], dict[str, list[tuple[int, int]]]]:
    """Return all texts as token ids, and by kind (number, tokens of the prompt) of those long enough, shuffled."""
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    ids: list[list[int]] = []
    found: dict[str, list[tuple[int, int]]] = {}
    for kind in options.kinds:
        numbers = []
        for prompt, output in pairs(kind, options):
            before = tokenizer.encode(prompt, add_special_tokens=False).ids[-options.prompt :]
            after = tokenizer.encode(output, add_special_tokens=False).ids[: options.output]
            if len(after) >= 24 and before:
                ids.append(before + after)
                numbers.append((len(ids) - 1, len(before)))
        np.random.default_rng(SEED).shuffle(numbers)
        found[kind] = [(int(number), int(size)) for number, size in numbers]
    return ids, found


class Load:
    """Sends texts and checks that each answer is its recorded output."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, keys: list[str], ids: list[list[int]], fields: dict[str, Any]
    ) -> None:
        """keys: of one tenant each, the last two in use. fields: of each request, beside those of its text."""
        self._session, self._url, self._keys, self._ids, self._fields = session, url, keys, ids, fields
        self.accepted = self.rejected = 0

    def begin_again(self) -> None:
        """Go on with two other tenants. Raise SystemExit where there are none."""
        del self._keys[-2:]
        if not self._keys:
            raise SystemExit(f"the texts began again {TENANTS // 2} times; lower --rounds")

    async def span(self, chosen: list[tuple[int, int]], streams: int, speculate: bool) -> float:
        """Return the tokens a second of a set of texts at so many at a time."""
        waiting, begun = list(chosen), time.monotonic()
        tokens = await asyncio.gather(*(self._stream(waiting, speculate) for _ in range(streams)))
        return sum(tokens) / (time.monotonic() - begun)

    async def _stream(self, waiting: list[tuple[int, int]], speculate: bool) -> int:
        tokens, headers = 0, {"Authorization": f"Bearer {self._keys[-1 - speculate]}"}
        while waiting:
            number, prompt = waiting.pop()
            output = self._ids[number][prompt:]
            body = {
                "model": "study", "prompt": self._ids[number][:prompt], "max_tokens": len(output), "seed": number + 1,
                "temperature": 1.0, "return_token_ids": True, "speculate": speculate, **self._fields,
            }  # fmt: skip
            async with self._session.post(f"{self._url}/v1/completions", json=body, headers=headers) as answer:
                found = await answer.json()
            if answer.status != 200 or found["choices"][0]["token_ids"] != output:
                raise SystemExit(f"text {number}: the answer is not the recorded output: {str(found)[:500]}")
            tokens += len(output)
            if details := found["usage"].get("completion_tokens_details"):
                self.accepted += details["accepted_prediction_tokens"]
                self.rejected += details["rejected_prediction_tokens"]
        return tokens


def measure(options: argparse.Namespace, keep: Callable[[list[dict[str, Any]]], None]) -> None:
    """Give `keep` the rows so far whenever one is done."""
    ids, chosen = recorded(options)
    keys = [secrets.token_hex(16) for _ in range(TENANTS)]
    with tempfile.TemporaryDirectory(prefix="speculation-") as scratch:
        file, key_file = Path(scratch) / "texts.json", Path(scratch) / "keys"
        file.write_text(json.dumps(ids))
        key_file.write_text("\n".join(keys))
        key_file.chmod(0o600)
        path = os.pathsep.join(filter(None, [str(HOOK), str(ROOT), os.environ.get("PYTHONPATH")]))
        up = ["--model", str(options.model), "--served-model-name", "study", "--api-key-file", str(key_file)]
        with stack(Path(scratch), up, {"PYTHONPATH": path, "RECORDED_TEXTS": str(file)}) as url:
            asyncio.run(spans(options, url, keys, ids, chosen, keep))


async def spans(
    options: argparse.Namespace,
    url: str,
    keys: list[str],
    ids: list[list[int]],
    chosen: dict[str, list[tuple[int, int]]],
    keep: Callable[[list[dict[str, Any]]], None],
) -> None:
    rows = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        warm = Load(session, url, keys, ids, OPEN)
        await warm.span(chosen[options.kinds[-1]][-8:], 4, speculate=False)
        for streams in options.streams:
            for kind in options.kinds:
                warm.begin_again()
                load = Load(session, url, keys, ids, BOUND if kind == "schema" else OPEN)
                rows.append(await compare(load, kind, streams, chosen[kind], options.rounds))
                print(json.dumps(rows[-1]), flush=True)
                keep(rows)


async def compare(load: Load, kind: str, streams: int, chosen: list[tuple[int, int]], rounds: int) -> dict[str, Any]:
    """Return ratios and speeds of one kind of text at so many streams.

    Raise SystemExit where there are too few texts for one round.
    """
    size, ratios, left = SETS.get(streams, streams + 8), [], list(chosen)
    speeds: tuple[list[float], list[float]] = ([], [])
    if len(left) < 2 * size:
        raise SystemExit(f"{kind}: {len(left)} texts found, a round of {streams} streams takes {2 * size}")
    for _ in range(rounds):
        if len(left) < 2 * size:
            load.begin_again()
            left = list(chosen)
        first, second = left[-size:], left[-2 * size : -size]
        del left[-2 * size :]
        plain, guessed = await load.span(first, streams, False), await load.span(first, streams, True)
        other = await load.span(second, streams, True), await load.span(second, streams, False)
        ratios.append((guessed + other[0]) / (plain + other[1]))
        speeds[0].append((plain + other[1]) / 2)
        speeds[1].append((guessed + other[0]) / 2)
    low, high = median_interval(ratios)
    checked = load.accepted + load.rejected
    return {
        "kind": kind, "streams": streams, "rounds": rounds, "ratio": round(float(np.median(ratios)), 3),
        "ratio_low": round(low, 3), "ratio_high": round(high, 3), "ratios": [round(ratio, 3) for ratio in ratios],
        "tok_s_without": round(float(np.median(speeds[0])), 1), "tok_s_with": round(float(np.median(speeds[1])), 1),
        "drafts": checked, "right": round(load.accepted / checked, 3) if checked else None,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.studies.speculation", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--old", type=Path, help="standard library of an older Python")
    parser.add_argument("--new", type=Path, help="standard library of a newer one")
    parser.add_argument("--model", type=Path, default=ROOT / "assets" / "demo-model")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
    parser.add_argument("--streams", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--prompt", type=int, default=400, help="tokens of a prompt at most")
    parser.add_argument("--output", type=int, default=150, help="tokens of an output at most")
    parser.add_argument("--name", default="speculation", help="of the result; empty writes none")
    options = parser.parse_args()
    if "edits" in options.kinds and not (options.old and options.new):
        parser.error("edits need --old and --new, folders like /usr/lib/python3.11; or leave them out of --kinds")
    model = "" if options.model == ROOT / "assets" / "demo-model" else options.model.name
    command = ["python", "-m", "bench.studies.speculation", "--rounds", str(options.rounds)]
    command += ["--kinds", ",".join(options.kinds), "--streams", ",".join(map(str, options.streams))]
    facts = provenance(command + (["--model", model] if model else []), "torch", "numpy")

    def keep(rows: list[dict[str, Any]]) -> None:
        if options.name:
            result = facts | {"model": options.model.name, "rows": rows}
            write(RESULTS / f"{options.name}.json", result, rows_on_lines=True)

    measure(options, keep)
    return 0


if __name__ == "__main__":
    sys.exit(main())
