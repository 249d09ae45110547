"""`python -m bench.gpu`: every part runs on the emulator and where few packages are; goals stand beside figures."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import render
from bench.engine.cases import EngineSettings
from bench.gpu import __main__ as gpu
from bench.gpu import ranks
from bench.gpu.context import Context
from bench.gpu.ranks import Drawn, comparison
from shared.errors import RankError
from shared.settings import WorkerSettings
from tests.support.compiler import needs_compiler

SERVICE_ONLY = {
    "redis_url", "redis_username", "redis_password", "redis_ca", "grpc_ca", "grpc_cert", "grpc_key", "shard",
    "log_level", "log_json", "listen", "advertise", "metrics_aliases", "otlp_endpoint", "metrics_host",
    "worker_metrics_port", "tp", "pp", "rank_listen", "rank_token",
}  # fmt: skip

FEW_PACKAGES = """
import sys
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

allowed, left = set(), ["torch", "numpy", "cupy-cuda13x", "grpcio", "protobuf", "safetensors", "orjson"]
while left:
    name = left.pop()
    if name in allowed:
        continue
    allowed.add(name)
    needs = [Requirement(text) for text in metadata.requires(name) or []]
    left += [canonicalize_name(one.name) for one in needs if one.marker is None or one.marker.evaluate({"extra": ""})]
ours = {"bench", "kernels", "protos", "services", "shared"}
known = {
    top
    for top, owners in metadata.packages_distributions().items()
    if allowed & {canonicalize_name(owner) for owner in owners}
}
known = known | ours | set(sys.stdlib_module_names)


class Few(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return PathFinder.find_spec(name, path, target) if path or name.partition(".")[0] in known else None


for name in [name for name in sys.modules if name.partition(".")[0] == "packaging"]:
    del sys.modules[name]
sys.meta_path = [Few if finder is PathFinder else finder for finder in sys.meta_path]
try:
    import pydantic
except ModuleNotFoundError:
    pass
else:
    sys.exit("pydantic is here")
"""


def test_the_settings_of_a_bench_are_those_of_a_worker() -> None:
    theirs = {name: field.default for name, field in WorkerSettings.model_fields.items() if name not in SERVICE_ONLY}
    ours = {field.name: field.default for field in dataclasses.fields(EngineSettings)}
    assert ours.keys() == theirs.keys()
    assert {name: ours[name] for name in ours if name != "model"} == {n: theirs[n] for n in theirs if n != "model"}
    assert SERVICE_ONLY & WorkerSettings.model_fields.keys()


@needs_compiler
@pytest.mark.parametrize("name", ["probes", "decode", "prefill", "sampler", "rows", "adapters", "swap"])
def test_a_part_of_the_gpu_bench_runs_on_the_emulator(name: str, tmp_path: Path) -> None:
    assert gpu.run_part(part(name), Context("emulator", True, tmp_path)) == 0
    result = json.loads((tmp_path / f"{name}.json").read_text())
    assert all(row["us"] is not None for row in result.get("rows", [])), result
    assert name == "probes" or result["rows"]
    if name == "adapters":
        assert [row["adapters"] for row in result["steps"]] == [0, 1, 8] * 2
        assert all(row["step_us"] > 0 for row in result["steps"])


@needs_compiler
def test_replicas_of_two_ranks_have_the_tokens_of_one_device(tmp_path: Path) -> None:
    """As on two GPUs, over Gloo in place of NCCL."""
    assert gpu.run_part(part("ranks"), Context("emulator", True, tmp_path)) == 0
    result = json.loads((tmp_path / "ranks.json").read_text())
    sizes = [(2, 1), (1, 2)]
    assert [(row["tp"], row["pp"], row["right"]) for row in result["tokens"]] == [(*size, True) for size in sizes]
    assert all(row["tokens"] > 16 for row in result["tokens"])
    assert [(row["tp"], row["pp"]) for row in result["steps"]] == [size for size in [(1, 1), *sizes] for _ in range(2)]
    assert [(row["tp"], row["exchange"], row["rows"]) for row in result["exchanges"]] == [
        *((2, name, rows) for rows in (1, 64) for name in ("sum over a stage", "parts to one rank")),
        *((1, "rows to the next stage", rows) for rows in (1, 64)),
    ]
    assert all(row["us"] > 0 for row in result["exchanges"])


@needs_compiler
def test_a_size_that_fails_is_an_error_and_others_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def compare(*given: Any) -> dict[str, Any]:
        sizes.append(given)
        if len(sizes) == 1:
            raise ValueError("no sum came")
        return comparison(*given)

    monkeypatch.setattr(ranks, "comparison", compare)
    with pytest.raises(RankError, match=r"^--tp 2 --pp 1: ValueError: no sum came$"):
        gpu.run_part(part("ranks"), Context("emulator", True, tmp_path))
    result = json.loads((tmp_path / "ranks.json").read_text())
    assert [(row["tp"], row["pp"], row["right"]) for row in result["tokens"]] == [(1, 2, True)]


def test_processes_of_a_part_that_aborts_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks, which NCCL holds when it has aborted the first one."""
    program, fifo = tmp_path / "aborts", tmp_path / "held"
    program.write_text(f"#!/bin/sh\nexec 3> {fifo}\nsleep 300 &\nexit 134\n")
    program.chmod(0o700)
    os.mkfifo(fifo)
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    writing = os.open(fifo, os.O_WRONLY)  # so that it has no end before the process has come
    monkeypatch.setattr(sys, "executable", str(program))
    try:
        assert gpu.run_all([part("ranks")], Context("emulator", True, tmp_path), []) == 1
        os.close(writing)
        assert select.select([reading], [], [], 20)[0] and os.read(reading, 1) == b""
    finally:
        os.close(reading)


def test_one_gpu_is_too_few_for_ranks_and_the_part_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert gpu.run_part(part("ranks"), Context("cuda", False, tmp_path)) == 0
    result = json.loads((tmp_path / "ranks.json").read_text())
    assert result == {
        "gpus": 1,
        "skipped": "1 GPU is here, and replicas of several ranks need two: nothing was measured",
    }


def test_tokens_of_ranks_are_wrong_where_they_differ_by_more_than_rounding() -> None:
    expected = [[Drawn(5, -1.0, 1.0), Drawn(6, -1.0, 0.15), Drawn(7, -1.0, 1.0)]]

    def seen(*drawn: tuple[int, float]) -> tuple[int, int, bool]:
        row = comparison(expected, [[Drawn(token, logprob, 0.0) for token, logprob in drawn]])
        return row["tokens"], row["wrong"], row["right"]

    assert seen((5, -1.05), (6, -1.0), (7, -0.95)) == (3, 0, True)
    assert seen((5, -1.0), (9, -1.0), (9, -3.0)) == (2, 0, True), "as good as the expected one"
    assert seen((5, -1.0), (6, -1.0), (9, -1.0)) == (3, 1, False)
    assert seen((5, -1.0), (6, -1.2), (7, -1.0)) == (3, 0, False)
    assert seen((5, -1.0), (6, -1.0), (7, math.nan)) == (3, 0, False)


def part(name: str) -> gpu.Part:
    return next(part for part in gpu.PARTS if part.name == name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_part_that_hangs_or_fails_is_named_and_others_continue(tmp_path: Path) -> None:
    context = Context("cuda", False, tmp_path)
    (tmp_path / "probes.json").write_text(json.dumps({"peaks": "of an earlier run"}))
    parts = [dataclasses.replace(part("compile"), limit_s=0.2), part("probes")]
    assert gpu.run_all(parts, context, ["python", "-m", "bench.gpu"]) == 1
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["parts"]["compile"]["error"] == "longer than 0.2 s"
    assert result["parts"]["probes"]["error"].startswith("exit 2: error: ")  # there is no GPU
    assert "peaks" not in result["parts"]["probes"]
    assert result["command"] == "python -m bench.gpu" and result["versions"]["torch"]


def fails(_: Context) -> Iterator[tuple[str, Any]]:
    """A part that finds two rows and ends by an error."""
    yield "rows", [1]
    yield "rows", [2]
    raise RuntimeError("an illegal memory access")


def test_what_a_part_found_before_it_failed_is_kept(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        gpu.run_part(gpu.Part("decode", 1.0, f"{__name__}:fails"), Context("cuda", False, tmp_path))
    assert json.loads((tmp_path / "decode.json").read_text()) == {"rows": [1, 2]}


def test_sanitizers_run_on_small_checks_and_findings_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\necho $PYTORCH_NO_CUDA_MEMORY_CACHING $*; test $2 = memcheck || exit 99\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert gpu.run_part(part("sanitizers"), Context("cuda", False, tmp_path)) == 0
    runs = json.loads((tmp_path / "sanitizers.json").read_text())["sanitizers"]
    assert [(run["name"], run["exit"]) for run in runs] == [("memcheck", 0), ("racecheck", 99)]
    assert runs[0]["said"].startswith("1 --tool memcheck --error-exitcode 99")
    assert runs[0]["said"].rstrip().endswith(f"--part checks --device cuda --quick --out {tmp_path}/memcheck")
    result = {"parts": {"sanitizers": {"sanitizers": runs}, "probes": {"device": {"name": ""}}}}
    shown = render.section("gpu", results={"gpu": result | {"date": "", "commit": "", "command": ""}})
    assert "| memcheck clean, racecheck NOT clean |" in shown


@needs_compiler
def test_engine_and_kernels_run_where_few_packages_are(tmp_path: Path) -> None:
    program = f"""{FEW_PACKAGES}
import bench.engine.cases, bench.gpu.ranks, bench.kernels.main, services.worker.engine
from bench.gpu import __main__ as gpu
from bench.gpu.context import Context
engine = next(part for part in gpu.PARTS if part.name == "engine")
gpu.run_part(engine, Context("emulator", True, Path({str(tmp_path)!r})))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "engine.json").read_text())
    assert [row["lookahead"] for row in result["steps"]] == [0, 1] * 2
    assert result["models"][0]["backend"] == "emulator" and all(row["step_us"] > 0 for row in result["steps"])
