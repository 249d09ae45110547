"""Common parts of all results: place, format, machine and commit.

Benches call `provenance` before they measure and keep its fields beside their figures. Pages show results through
bench/render.py. The standard library alone: some benches run where little else is installed.

    python -m bench.result NAME [--note TEXT] RUN.json ...    gathers runs into bench/results/NAME.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


def provenance(command: Sequence[str], *packages: str) -> dict[str, Any]:
    """Return command, date, commit, machine and versions. Call it before measuring: `machine` has the load.

    packages: their versions are kept; see `versions`.
    """
    return {
        "command": shlex.join(command),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(*packages),
    }


def read(name: str) -> Any:
    """Return the committed result `name`, None when there is none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def write(path: Path, result: Any, rows_on_lines: bool = False) -> None:
    """Write a result as JSON.

    rows_on_lines: put each entry of a top-level list on one line, so that two long results can be compared.
    """
    text = _by_rows(result) if rows_on_lines else json.dumps(result, indent=1)
    path.write_text(text + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Gather the outputs of several runs of one bench into its committed result."""
    parser = argparse.ArgumentParser(prog="python -m bench.result", description=main.__doc__)
    parser.add_argument("name", help="of the result: engine or serve-demo")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="JSON written by one run of the bench")
    parser.add_argument("--note", default="", help="what else has to be known about how this was measured")
    options = parser.parse_args(argv)
    runs = [json.loads(path.read_text()) for path in options.runs]
    write(RESULTS / f"{options.name}.json", {"note": options.note, "runs": runs})
    return 0


def _by_rows(result: dict[str, Any]) -> str:
    lines = []
    for key, value in result.items():
        text = json.dumps(value)
        if isinstance(value, list):
            text = "[\n" + ",\n".join("  " + json.dumps(entry) for entry in value) + "\n ]"
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}"


def machine() -> dict[str, Any]:
    """Return processor, cores, memory, system and load; a load near the core count means a shared machine."""
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
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "load_1m_before": round(os.getloadavg()[0], 2),
    }


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages or ("orcinus", "aiohttp", "torch"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Return the short commit of the checkout, with `+` when tracked files differ from it; None outside git."""
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


if __name__ == "__main__":
    sys.exit(main())
