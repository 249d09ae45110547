"""What stands around the figures of a load run: machine, versions, command, commit; and the table for people.

Called by `bench/load.py`.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
SECRET_OPTION = "--api-key"  # noqa: S105 - the option's name
LATENCIES = ("ttft_ms", "tbt_ms", "tpot_ms", "normalized_latency_ms", "e2e_ms", "late_ms")


def machine() -> dict[str, Any]:
    """Processor, cores, memory, system, and how busy it was: a load near the core count means a shared machine."""
    name = platform.processor()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return {
        "cpu": name or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "load_1m_before": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("orcinus", "aiohttp", "torch"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Short commit of the checkout, `+` appended when tracked files differ from it; None outside git."""
    try:
        head = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"], capture_output=True, check=True
        )
        diff = subprocess.run(
            ["git", "-C", str(ROOT), "status", "--porcelain", "-uno"], capture_output=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.decode().strip() + ("+" if diff.stdout.strip() else "")


def command_line(argv: Sequence[str]) -> str:
    """The command as it was typed, without the key."""
    shown: list[str] = []
    for word in argv:
        if shown and shown[-1] == SECRET_OPTION:
            shown.append("***")
        elif word.startswith(f"{SECRET_OPTION}="):
            shown.append(f"{SECRET_OPTION}=***")
        else:
            shown.append(word)
    return "orcinus bench serve " + shlex.join(shown)


def provenance(argv: Sequence[str]) -> dict[str, Any]:
    return {
        "command": command_line(argv),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
    }


def print_table(result: dict[str, Any], console: Console) -> None:
    """The figures for people, on stdout when `--json` was not asked for."""

    def shown(value: Any) -> str:
        return "-" if value is None else f"{value:,.1f}" if isinstance(value, float) else str(value)

    table = Table(title=f"{result['model']} at {result['url']}")
    for column in ("milliseconds", "p50", "p90", "p99"):
        table.add_column(column, justify="left" if column == "milliseconds" else "right")
    for name in LATENCIES:
        table.add_row(name.removesuffix("_ms"), *(shown(result[name][p]) for p in ("p50", "p90", "p99")))
    console.print(table)
    console.print(
        f"{result['finished']} of {result['requests']} requests finished in {shown(result['wall_s'])} s: "
        f"{shown(result['output_tok_s'])} output tok/s, {shown(result['throughput_tok_s'])} tok/s with prompts, "
        f"goodput {shown(result['goodput_rps'])} requests/s"
    )
    if result["errors"]:
        console.print("failed: " + ", ".join(f"{count} {kind}" for kind, count in result["errors"].items()))
