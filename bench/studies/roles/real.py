"""Separate prefill and decode workers against combined ones, under `orcinus bench serve`.

    python -m bench.studies.roles.real [--rounds 2] [--requests 40] [--rate 0.6] [--out FILE]

`orcinus up` with two workers, once `--replicas 2` and once `--prefill 1 --decode 1`, in turn in each round, so that
what else slows the machine down slows down both. The model has random weights: its shape makes a prompt cost as much
as dozens of decode steps. All workers share the cores of this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from bench.local import stack
from bench.result import provenance, write
from services.launcher.rundir import RunDir
from shared.settings import DEMO_MODEL, ROOT

MODES = {"together": ["--replicas", "2"], "apart": ["--prefill", "1", "--decode", "1"]}
SHAPE = {
    "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 2048, "dtype": "float32",
}  # fmt: skip
SHOWN = ("ttft_ms", "tbt_ms", "e2e_ms")


def make_model(directory: Path) -> Path:
    """Make a model with the demo model's tokenizer and a larger shape, without weights."""
    directory.mkdir()
    for file in DEMO_MODEL.iterdir():
        if file.suffix == ".json" and file.name != "config.json":
            (directory / file.name).symlink_to(file)
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | SHAPE))
    return directory


def measure(model: Path, mode: str, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Run the load generator once against a new stack."""
    up = [
        *("--model", str(model), "--load-format", "dummy", *MODES[mode], "--device", "cpu", "--kernels", "cpu"),
        *("--threads", "1", "--max-seqs", "16", "--kv-blocks", "2048"),
    ]
    with tempfile.TemporaryDirectory() as directory, stack(Path(directory), up) as url:
        pids = RunDir(Path(directory) / "run").pids()
        workers = {name: pid for name, pid in pids.items() if name.startswith("worker")}
        argv = [
            *(sys.executable, "-m", "services.cli", "bench", "serve", "--url", url, "--json", "--warmup", "4"),
            *("--rate", str(options.rate), "--requests", str(options.requests), "--seed", str(seed)),
            *("--prompt-tokens", options.prompt_tokens, "--output-tokens", options.output_tokens),
        ]
        before = cpu_s(workers)
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=900)
        if done.returncode:
            raise RuntimeError(f"the load generator ended with {done.returncode}: {done.stderr[-2000:]}")
        used = {name: round(seconds - before[name], 2) for name, seconds in cpu_s(workers).items()}
    found = json.loads(done.stdout)
    kept = ("command", "finished", "failed", "wall_s", "output_tok_s", *SHOWN)
    return {"mode": mode, "seed": seed, **{name: found[name] for name in kept}, "worker_cpu_s": used}


def cpu_s(pids: dict[str, int]) -> dict[str, float]:
    """Return the CPU time of each process so far."""
    times = {name: psutil.Process(pid).cpu_times() for name, pid in pids.items()}
    return {name: spent.user + spent.system for name, spent in times.items()}


def middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure over the rounds, by mode."""
    return {
        mode: {
            name: {
                part: statistics.median(run[name][part] for run in runs if run["mode"] == mode)
                for part in runs[0][name]
            }
            for name in SHOWN
        }
        for mode in MODES
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.roles.real", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rate", type=float, default=0.6)
    parser.add_argument("--prompt-tokens", default="500:1500")
    parser.add_argument("--output-tokens", default="64")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    command = ["python", "-m", "bench.studies.roles.real"]
    for name, value in vars(options).items():
        if name != "out":
            command += [f"--{name.replace('_', '-')}", str(value)]
    facts = provenance(command, "torch", "numpy")
    runs, load = [], []
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory) / "random")
        for number in range(options.rounds):
            for mode in MODES if number % 2 == 0 else reversed(MODES):
                runs.append(measure(model, mode, options, number))
                load.append(round(os.getloadavg()[0], 1))
                print(f"{mode}: { ({name: runs[-1][name] for name in SHOWN}) }", file=sys.stderr, flush=True)
    result = {
        "bench": "roles-real",
        "shape": SHAPE,
        "middle": middle(runs),
        "runs": runs,
        "load_average": load,
        **facts,
    }
    if options.out:
        write(options.out, result)
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
