"""`make schemathesis`: requests generated from the OpenAPI document, valid and broken, against a whole live stack.

No answer may be a server error, of an undocumented status or content type, or of another shape than documented.
Bounded: a fixed seed and a fixed number of examples for each operation (EXAMPLES=n for more), or, with SECONDS=n, new
examples until the time is over; --output keeps what that found. Exit 1 on a finding.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import orjson

from bench import result
from bench.result import provenance
from tests.support.checkpoints.models import make_llama
from tests.support.stack import Stack, running_stack

KEY = "schemathesis-key"
SEED = 20260101
REPORT = "report.json"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
    "unsupported_method",
    "allow_header_conformance",
    "ignored_auth",
)

REFUSALS = """[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 406, 408, 409, 413, 415, 422, 428, 429, 431, "5xx"]
"""
"""Answers to a body that the document does not allow; schemathesis's own list lacks those of size and time."""


def document(stack: Stack) -> Path:
    """The stack's OpenAPI document with the one model that exists: other names would all end in 404 at the door."""
    schema = httpx.get(f"{stack.url}/openapi.json", headers=stack.headers, timeout=60).raise_for_status().json()
    for body in schema["components"]["schemas"].values():
        if model := body.get("properties", {}).get("model"):
            nullable = {"type": "null"} in model.pop("anyOf", [])
            model |= {"type": ["string", "null"] if nullable else "string", "enum": [stack.name]}
            model["enum"] += [None] if nullable else []
    for parameter in schema["paths"]["/v1/models/{model_id}"]["get"]["parameters"]:
        parameter["schema"] = {"type": "string", "enum": [stack.name, "another"]}
    file = stack.directory / "openapi.json"
    file.write_text(json.dumps(schema))
    return file


def command(stack: Stack, examples: int, seconds: int, seed: int) -> list[str]:
    (config := stack.directory / "schemathesis.toml").write_text(REFUSALS)
    bound = ["--max-time", str(seconds)] if seconds else ["--max-examples", str(examples)]
    return [
        str(Path(sys.executable).with_name("schemathesis")), "--config-file", str(config), "run", str(document(stack)),
        "--url", stack.url,
        "--header", f"Authorization: Bearer {stack.key}",
        "--checks", ",".join(CHECKS),
        "--phases", "examples,coverage,fuzzing",
        *bound,
        "--seed", str(seed),
        "--report-json-path", str(stack.directory / REPORT),
        "--request-timeout", "60",
        "--continue-on-failure",
        "--no-color",
    ]  # fmt: skip


def figures(report: dict[str, Any], is_settled: bool) -> dict[str, Any]:
    """What a run did and found, out of schemathesis's own report. is_settled: nothing was held behind it."""
    rates = [rate for phases in report["valid_rates"].values() for rate in phases.values()]
    return {
        "seed": report["seed"],
        "seconds": round(report["running_time"], 1),
        "stopped_by": report["stop_reason"],
        "operations": report["operations"]["tested"],
        "requests": report["test_cases"]["generated"],
        "valid_requests": {name: sum(rate[name] for rate in rates) for name in ("accepted", "rejected")},
        "phases": {name: phase["status"] for name, phase in report["phases"].items()},
        "failures": report["failures"],
        "errors": report["errors"],
        "warnings": {name: found for name, found in report["warnings"].items() if found},
        "nothing_left": is_settled,
    }


def write(output: Path, found: dict[str, Any], argv: list[str]) -> None:
    """The figures with what they were taken on."""
    facts = provenance(["python", "-m", "tests.api_fuzz.run", *argv], "orcinus", "schemathesis")
    result.write(output, {**facts, **found})


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make schemathesis", description=__doc__)
    parser.add_argument("--examples", type=int, default=25, help="generated requests for each operation")
    parser.add_argument("--seconds", type=int, default=0, help="instead: as many as there is time for")
    parser.add_argument("--output", type=Path, help="writes what was done and found there, as a JSON object")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="orcinus-fuzz-") as directory:
        model = Path(directory) / "tiny"
        make_llama(model, seed=11, requests=1, max_position_embeddings=96)  # short answers: the door is tested
        with running_stack(Path(directory) / "stack", model, key=KEY, kv_blocks=512) as stack:
            # In the temporary directory: schemathesis leaves its examples where it runs.
            seed = random.randrange(1 << 32) if options.seconds else SEED
            run = command(stack, options.examples, options.seconds, seed)
            done = subprocess.run(run, cwd=stack.directory, check=False)
            if done.returncode == 0:
                stack.settled()  # nothing of what was sent is still held
                print("no block, queue entry or request is left")
            if options.output:
                report = orjson.loads((stack.directory / REPORT).read_bytes())
                write(options.output, figures(report, done.returncode == 0), argv)
            return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
