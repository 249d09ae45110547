"""The tables of docs/scale.md, made from bench/results/*.json: `python -m bench.fleet.docs`.

tests/unit/bench/test_fleet.py fails when tables of the fleet's own results differ from them.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from bench.machine import ROOT

RESULTS, PAGE = ROOT / "bench" / "results", ROOT / "docs" / "scale.md"
PROMPT, OUTPUT = 1155, 211  # tokens of a request of the chat trace, on average
BUSY = 0.6  # of a core or a replica, planned for


@dataclass(frozen=True, slots=True)
class Units:
    """What one of each was measured to cost, CPU microseconds of one core."""

    gateway_token: float
    scheduler_step: float
    redis_token: float
    redis_request: float


def units() -> Units:
    gateway = [each for each in _read("gateway")["results"] if each["case"] == "rate" and each["endpoint"] == "chat"]
    several = _read("replicas")["drives"][-1]  # the process with its sockets, not only its core
    server = _read("fleet-redis")["cpu_us"]
    return Units(gateway[0]["cpu_us_per_token"], several["cpu_us_a_step"], server["token"], server["request"])


def tables() -> dict[str, str]:
    """By name, as they stand in the page."""
    fleet = _read("fleet")
    return {
        "redis": _redis(_read("fleet-redis")),
        "calibration": _calibration(fleet["calibration"]),
        "routing": _runs(fleet["routing"]["runs"]),
        "sizes": _runs(fleet["sizes"]["runs"], "wall_s", "requests_per_cpu_s"),
        "mixed": _runs(fleet["mixed"]["runs"]),
        "prefix": _runs(fleet["prefix"]["runs"], "hit_share"),
        "failures": _runs(fleet["failures"]["runs"], "failures", "restarted"),
        "autoscaling": _runs(fleet["autoscaling"]["runs"], "replica_hours", "cost_per_million_output"),
    }


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def plan(users: int, think_s: float, replica_rps: float, step_ms: float) -> str:
    """What so many users need, each with a request every `think_s` seconds; replicas as the simulator has them."""
    of = units()
    requests = users / think_s
    tokens = requests * OUTPUT
    replicas = requests / replica_rps
    steps = replicas * 1000 / step_ms
    redis_s = (tokens * of.redis_token + requests * of.redis_request) / 1e6
    rows = [
        ("requests", f"{users:,} users / {think_s:g} s", f"{requests:,.0f} a second"),
        ("tokens out", f"requests x {OUTPUT}", f"{tokens / 1e6:,.1f} million a second"),
        ("tokens in", f"requests x {PROMPT:,}", f"{requests * PROMPT / 1e6:,.1f} million a second"),
        ("replicas", f"requests / {replica_rps:g}", f"{replicas:,.0f}"),
        _cores("gateway processes", f"tokens out x {of.gateway_token:.1f} us", tokens * of.gateway_token / 1e6),
        _cores(
            "schedulers",
            f"replicas / {step_ms:g} ms x {of.scheduler_step:.0f} us",
            steps * of.scheduler_step / 1e6,
        ),
        _cores(
            "Redis servers", f"tokens out x {of.redis_token:.2f} us + requests x {of.redis_request:.0f} us", redis_s
        ),
    ]
    return _table(("what", "from", "needed"), rows)


def _cores(what: str, of: str, seconds: float) -> tuple[str, str, str]:
    """A row: so many processor seconds a second, at BUSY of a core each."""
    return what, f"({of}) / {BUSY:g}", f"{math.ceil(seconds / BUSY):,}"


def _redis(found: dict[str, Any]) -> str:
    of = found["cpu_us"]
    come = f"a request comes ({found['prompt_tokens']} tokens of prompt), is claimed, ends"
    published = f"an iteration of {found['running']} tokens is published, read by a gateway"
    rows = [
        (come, *(f"{of[f'{name}_request']:.0f}" for name in ("enqueue", "claim", "end"))),
        (published, f"{of['publish_iteration']:.0f}", f"{of['read_iteration']:.0f}", ""),
        ("32 tokens of a sequence go to its record", f"{of['checkpoint_sequence']:.1f}", "", ""),
        ("so a token, a request", f"{of['token']:.2f}", f"{of['request']:.0f}", ""),
    ]
    on = f"{found['machine']['cpu']}, Redis {found['versions']['redis-server']}"
    about = f"{found['date'][:10]}, commit `{found['commit']}`, {on}; other programs ran."
    return _table(("what", "us", "us", "us"), rows) + f"\n\n{about}"


def _calibration(found: list[dict[str, Any]]) -> str:
    rows = []
    for each in found:
        cells = [_both(figure) for figure in each["figures"].values()]
        cpu = f"{each['core_cpu_s']} / {each['fluid_cpu_s']}"
        rows.append((str(each["replicas"]), f"{each['rate_rps']:g}", *cells, cpu))
    return _table(("replicas", "requests/s of each", *found[0]["figures"], "CPU s"), rows)


def _both(figure: dict[str, float]) -> str:
    digits = 0 if figure["core"] >= 100 else 1
    return f"{figure['core']:,.{digits}f} / {figure['fluid']:,.{digits}f} ({figure['error']:+.0%})"


MORE = {
    "hit_share": ("found in caches", "{:.1%}"),
    "failures": ("failures", "{:,}"),
    "restarted": ("requests begun anew", "{:,}"),
    "replica_hours": ("replica hours", "{:,.1f}"),
    "cost_per_million_output": ("replica hours a million output tokens", "{:.4f}"),
    "wall_s": ("wall s", "{:,.0f}"),
    "requests_per_cpu_s": ("requests a CPU second", "{:,}"),
}


def _runs(found: list[dict[str, Any]], *more: str) -> str:
    rows = []
    for r in found:
        times = [f"{r[name][p]:,.1f}" for name in ("ttft_ms", "normalized_latency_ms") for p in ("p50", "p99")]
        balance = "-" if r["imbalance"] is None else f"{r['imbalance']:.2f}"
        extra = [MORE[name][1].format(r[name]) for name in more]
        rows.append((r["label"], f"{r['finished']:,}", *times, f"{r['good_share']:.2%}", balance, *extra))
    head = ("", "requests", "TTFT p50, ms", "p99", "ms a token p50", "p99", "good", "imbalance")
    return _table((*head, *(MORE[name][0] for name in more)), rows)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fill(page: str, made: dict[str, str]) -> str:
    """The page with these tables."""
    for name, text in made.items():
        block = f"<!-- fleet: {name} -->\n{text}\n<!-- end -->"
        page = re.sub(rf"<!-- fleet: {name} -->.*?<!-- end -->", lambda _, block=block: block, page, flags=re.DOTALL)
    return page


def main() -> None:
    million = plan(1_000_000, 60, 16, 11)
    PAGE.write_text(fill(PAGE.read_text(), {**tables(), "plan": million}))


if __name__ == "__main__":
    main()
