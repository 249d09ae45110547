"""The options of `orcinus bench serve`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from shared.command_line.arguments import Parser

Number = TypeVar("Number", int, float)


def length_range(text: str) -> tuple[int, int]:
    """Return `64` or `16:128` as (low, high). Raises argparse.ArgumentTypeError."""
    low, _, high = text.partition(":")
    try:
        bounds = (int(low), int(high or low))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens or LOW:HIGH") from None
    if not 1 <= bounds[0] <= bounds[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: needs 1 <= LOW <= HIGH")
    return bounds


def positive(text: str) -> float:
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} must not be negative")
    return value


def at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def several(one: Callable[[str], Number]) -> Callable[[str], list[Number]]:
    """Return a converter of `2` or `1,2,4`, each read by `one`."""

    def read(text: str) -> list[Number]:
        try:
            return [one(part) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number, nor several with commas between them") from None

    return read


def parser() -> Parser:
    build = Parser("orcinus bench serve", "Measure an OpenAI-compatible server with streaming completions.")
    add = build.add_argument
    add(
        "--url",
        default="",
        help="base URL of the server (default: the stack that runs here, else http://127.0.0.1:8000)",
    )
    add(
        "--model",
        default="",
        help="model id (default: that of the stack that runs here, or the only one of the server)",
    )
    add(
        "--rate",
        type=several(positive),
        metavar="X,..",
        help="open loop: requests a second, Poisson unless --burstiness is given; "
        "R,R,... runs one after another (a sweep)",
    )
    add("--burstiness", type=positive, default=1.0, help="gamma shape of the intervals; 1: Poisson, below 1: bursts")
    add(
        "--concurrency",
        type=several(count),
        metavar="N,..",
        help="closed loop: so many requests at a time, the next when one ends; C,C,... is a sweep (default 8, without "
        "--rate and --trace)",
    )
    add("--trace", type=Path, help="CSV with num_prefill_tokens, num_decode_tokens and perhaps arrived_at")
    add("--rate-scale", type=positive, default=1.0, help="divides the trace's arrival times")
    add("--clip-tokens", type=count, default=0, help="cut requests to so many tokens of prompt and output together")
    add("--requests", type=at_least_one, default=0, help="how many (default 100, or the whole trace)")
    add("--seconds", type=positive, help="open loop, instead of --requests: as many as --rate sends in so long")
    add("--prompt-tokens", type=length_range, default=(128, 128), help="P or LOW:HIGH (default 128)")
    add("--output-tokens", type=length_range, default=(64, 64), help="O or LOW:HIGH (default 64)")
    add("--warmup", type=count, default=4, help="requests sent first and not counted")
    add("--text", action="store_true", help="send prompts as text, for servers that take no token ids")
    add("--vocab-size", type=count, default=2048, help="token ids of prompts are below it")
    add("--first-id", type=count, default=256, help="smallest token id of prompts")
    add("--temperature", type=float, default=0.0, help="of every request")
    add("--seed", type=count, default=1, help="of prompts, lengths and times")
    add("--timeout", type=positive, default=600.0, help="seconds that one request may take")
    add("--api-key", default="", help="key for the server (default: ORCINUS_API_KEY, or that of ORCINUS_API_KEY_FILE)")
    add("--json", action="store_true", help="print one JSON object on stdout")
    add("--output", type=Path, help="writes the JSON object to a file too")
    add("--records", type=Path, help="writes one JSON line a request: times of every event")
    add("--ttft-slo-ms", type=positive, default=2000.0, help="for goodput: TTFT")
    add("--tbt-slo-ms", type=positive, default=100.0, help="for goodput: P99 of a request's gaps")
    add("--csv", type=Path, help="writes one row a run: loads and figures")
    add("--html", type=Path, help="writes a report with pictures, one file: throughput and latency against load")
    add("--plot", type=Path, help="writes a PNG: TTFT, TBT and throughput over time")
    return build
