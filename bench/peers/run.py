"""The rounds of a comparison: every server in turn, repeatedly, each newly started and alone on the machine.

`measure` returns the result object that `bench/peers/table.py` finishes and bench/templates/peers.md shows. A
server that does not start, or stops answering, is a row with its error. Called by `python -m bench.peers`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.peers import client, install, table
from bench.peers.process import Running, StartError
from bench.peers.servers import Server
from bench.result import provenance, versions

Row = dict[str, Any]
Say = Callable[[str], None]
FAILURES = (StartError, RuntimeError, OSError, TimeoutError, KeyError, ValueError)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: rounds, requests by concurrency, seconds of the mix (0: none)."""

    rounds: int
    requests: dict[int, int]
    mix_s: float


FULL = Plan(3, client.REQUESTS, client.MIX_S)
QUICK = Plan(1, {1: 3, 8: 16, 32: 32}, 4.0)
LARGE = Plan(3, {1: 4, 8: 24, 32: 64}, client.MIX_S)  # of a model that takes ten times as long


def measure(servers: Sequence[Server], model: str, plan: Plan, command: Sequence[str], say: Say) -> Row:
    """Measure everything, and keep the results so far in `.peers/last.json` after each server."""
    result: Row = {
        "bench": "peers",
        **provenance(command),
        "settings": {
            "model": model,
            "rounds": plan.rounds,
            "requests": plan.requests,
            "prompt_tokens": client.PROMPT,
            "output_tokens": client.OUTPUT,
            "longest_prompt_tokens": client.LONGEST,
            "mix": {
                "seconds": plan.mix_s,
                "streams": client.MIX_STREAMS,
                "output_tokens": client.MIX_OUTPUT,
                "long_prompt_tokens": client.LONG_PROMPT,
                "long_every_s": client.LONG_EVERY_S,
            },
        },
        "rows": [new_row(server, model) for server in servers],
    }
    reference = json.loads((install.MODELS / model / "reference.json").read_text())
    result["model_sha256"] = reference["weights_sha256"]
    for round_ in range(plan.rounds):
        for server, row in zip(servers, result["rows"], strict=True):
            if row["error"] and not row["rounds"]:
                continue  # it never ran, so it is not tried again
            say(f"round {round_ + 1} of {plan.rounds}: {server.name}")
            one_round(server, model, row, round_, plan, reference["rows"], say)
            (install.HOME / "last.json").write_text(json.dumps(result, indent=1) + "\n")
    return table.finish(result)


def new_row(server: Server, model: str) -> Row:
    found = {name: install.state(name) for name in server.recipes(model)}
    errors = [f"{name}: {state.error}" for name, state in found.items() if not state.ok]
    shown = found[server.recipe].versions if server.recipe else versions()
    return {
        "name": server.name,
        "peer": server.peer,
        "declared": server.precision,
        "about": server.about,
        "versions": shown,
        "same_answers": None,
        "of_answers": None,
        "installed": not errors,
        "error": (errors or [""])[0],
        "rounds": [],
    }


def one_round(server: Server, model: str, row: Row, round_: int, plan: Plan, reference: list[Row], say: Say) -> None:
    """Start the server, check its answers once, measure, stop it."""
    found: Row = {"round": round_ + 1, "cells": {}}
    log = install.HOME / "logs" / f"{server.name.replace(' ', '-')}.log"
    log.parent.mkdir(exist_ok=True)
    try:
        with Running(server, model, log) as running:
            found["start_s"] = round(running.start_s, 1)
            if row["same_answers"] is None:
                same = client.check(running, reference)
                row.update(same_answers=same, of_answers=len(reference))
                say(f"  up after {running.start_s:.0f} s; {same} of {len(reference)} answers as the reference's")
            for concurrency, total in plan.requests.items():
                cell = client.measure_closed(running, round_, concurrency, total)
                found["cells"][f"c{concurrency}"] = cell
                say(f"  {concurrency:2} at a time: {describe(cell)}")
            found["cells"]["longest"] = cell = client.measure_longest(running, round_)
            say(f"  {client.LONGEST} tokens: TTFT {cell['ttft_ms']['p50']} ms")
            if plan.mix_s:
                found["cells"]["mix"] = cell = client.measure_mix(running, round_, plan.mix_s)
                say(f"  long prompts: {describe(cell)}")
            found["memory_mib"] = round(running.memory_mib())
    except FAILURES as error:
        row["error"] = f"round {round_ + 1}: {error or type(error).__name__}"[:300]
        say(f"  failed: {row['error']}")
    if found["cells"]:
        row["rounds"].append(found)


def describe(cell: Row) -> str:
    gaps = cell["tbt_ms"]
    text = f"{cell['output_tok_s'] or 0:,.0f} tok/s, TBT {gaps['p50']} / {gaps['p99']} / {gaps['max']} ms"
    if not table.counts(cell):
        text += f"; {cell['finished']} of {cell['requests']} finished, {cell['short']} short {cell['errors'][:1]}"
    return text + f" (others used {cell['other_cores']:.2f} cores)"
