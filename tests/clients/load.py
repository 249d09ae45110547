"""`make bench-clients`: guidellm and aiperf drive a live stack once; what they report is kept in bench/results/.

Whether they accept the server is what is looked for: a request that fails is an error. Their figures are those of the
demo model on whatever machine this is, each by the client's own definitions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.result import commit, machine
from shared.settings import DEMO_MODEL, ROOT
from tests.clients import install
from tests.support.stack import Stack, running_stack

KEY = "sk-load"
RESULTS = ROOT / "bench" / "results"
REQUESTS, CLIENTS, PROMPT_TOKENS, OUTPUT_TOKENS = 64, 8, 128, 64
LIMIT_S = 600
PERCENTILES = ("p50", "p95", "p99")


def guidellm(stack: Stack, folder: Path) -> tuple[list[str], dict[str, Any]]:
    """The command, and what its report says."""
    command = [
        "guidellm", "run",
        "--backend", f"kind=openai_http,target={stack.url},model={stack.name},api_key={KEY}",
        "--profile", f"kind=concurrent,streams={CLIENTS}",
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--tokenizer", f"kind=huggingface_auto,model={DEMO_MODEL}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        "--output", f"kind=json,path={folder / 'report.json'}",
        "--disable-console-interactive",
    ]  # fmt: skip
    run("guidellm", command, folder, {"HF_HUB_OFFLINE": "1"})
    metrics = json.loads((folder / "report.json").read_text())["benchmarks"][0]["metrics"]

    def percentiles(name: str, scale: float = 1.0) -> dict[str, float]:
        found = metrics[name]["successful"]["percentiles"]
        return {percentile: round(scale * found[percentile], 3) for percentile in PERCENTILES}

    return command, {
        "completed": metrics["request_totals"]["successful"],
        "failed": metrics["request_totals"]["total"] - metrics["request_totals"]["successful"],
        "latency_ms": percentiles("request_latency", 1000.0),
        "ttft_ms": percentiles("time_to_first_token_ms"),
        "inter_token_ms": percentiles("inter_token_latency_ms"),
        "requests_per_s": round(metrics["requests_per_second"]["successful"]["mean"], 2),
        "output_tokens_per_s": round(metrics["output_tokens_per_second"]["successful"]["mean"], 1),
    }


def aiperf(stack: Stack, folder: Path) -> tuple[list[str], dict[str, Any]]:
    """The command, and what its report says."""
    command = [
        "aiperf", "profile", "--model", stack.name, "--url", stack.url, "--api-key", KEY,
        "--endpoint-type", "chat", "--streaming", "--tokenizer", str(DEMO_MODEL),
        "--concurrency", str(CLIENTS), "--request-count", str(REQUESTS),
        "--isl", str(PROMPT_TOKENS), "--osl", str(OUTPUT_TOKENS), "--extra-inputs", "ignore_eos:true",
        "--random-seed", "7", "--ui", "none", "--artifact-dir", str(folder),
    ]  # fmt: skip
    run("aiperf", command, folder, {})
    report = json.loads((folder / "profile_export_aiperf.json").read_text())

    def percentiles(name: str) -> dict[str, float]:
        return {percentile: round(report[name][percentile], 3) for percentile in PERCENTILES}

    completed = int(report["request_count"]["avg"])
    return command, {
        "completed": completed,
        "failed": REQUESTS - completed,
        "latency_ms": percentiles("request_latency"),
        "ttft_ms": percentiles("time_to_first_token"),
        "inter_token_ms": percentiles("inter_token_latency"),
        "requests_per_s": round(report["request_throughput"]["avg"], 2),
        "output_tokens_per_s": round(report["output_token_throughput"]["avg"], 1),
    }


def run(name: str, command: list[str], folder: Path, more: dict[str, str]) -> None:
    """Raises CalledProcessError with the end of what was said on stderr."""
    program = install.HOME / name / "bin" / command[0]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("ORCINUS_")}
    with (folder / "output.log").open("wb") as log:
        done = subprocess.run(
            [program, *command[1:]], cwd=folder, env={**clean, **more}, stdout=log, stderr=log, timeout=LIMIT_S
        )
    if done.returncode:
        print((folder / "output.log").read_text(errors="replace")[-4000:], file=sys.stderr)
    done.check_returncode()


def shown(command: list[str], stack: Stack, folder: Path) -> str:
    """A command as it may be printed: no address and no folder of this run, no key."""
    told = " ".join(command)
    hidden = {stack.url: "http://127.0.0.1:8000", KEY: "$ORCINUS_API_KEY", str(folder): ".", f"{ROOT}/": ""}
    for text, instead in hidden.items():
        told = told.replace(text, instead)
    return told


def main() -> int:
    """0, or 1 when a client says that a request failed."""
    failed = 0
    with tempfile.TemporaryDirectory(prefix="orcinus-load-") as directory:
        where = machine()
        with running_stack(Path(directory) / "stack", DEMO_MODEL, key=KEY) as stack:
            for name, drive in (("guidellm", guidellm), ("aiperf", aiperf)):
                folder = Path(directory) / name
                folder.mkdir()
                command, figures = drive(stack, folder)
                failed += figures["failed"]
                result = {
                    "client": install.pins("load-clients")[name][0],
                    "command": shown(command, stack, folder),
                    "date": f"{datetime.now(UTC):%Y-%m-%d}",
                    "commit": commit(),
                    "machine": where,
                    "figures": figures,
                }
                (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
                print(f"{name}: {json.dumps(figures)}")
            stack.settled()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
