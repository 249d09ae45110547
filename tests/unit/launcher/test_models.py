"""What `orcinus up --models` starts for each model of a file, and what it refuses before anything starts."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from services.cli.options import check_policy
from services.launcher import up
from services.launcher.model_check import GIB, Share, shape_problem, share_of, sum_problem
from services.launcher.placements import MISMATCH_S, SleepingServices
from services.worker.models.config import load_config
from shared.errors import ConfigurationError
from shared.keys import PLACER_KEYS
from shared.placement import Placement
from shared.settings import DEMO_MODEL, WorkerSettings
from tests.support.waiting import until

FILE = """
models:
  small: {source: a, quantize: int8, policy: sarathi}
  large: {source: b, workers: 2, threads: 3}
"""


@pytest.fixture
def models(tmp_path: Path) -> str:
    for name in "ab":
        (tmp_path / name).mkdir()
    path = tmp_path / "models.yaml"
    path.write_text(FILE)
    return str(path)


def test_each_model_has_its_settings_over_those_of_all(models: str) -> None:
    options = up.options_by_model({"models": models, "quantize": "none", "block_size": "32"})
    small, large = map(up.ModelStack.of, options)
    assert [stack.gateway.served_model_name for stack in (small, large)] == ["small", "large"]
    assert (small.worker.quantize, small.scheduler.policy, small.launcher.roles()) == ("int8", "sarathi", ["both"])
    assert (large.worker.quantize, large.worker.threads, large.launcher.roles()) == ("none", 3, ["both", "both"])
    assert {stack.worker.block_size for stack in (small, large)} == {32}
    named = up.options_by_model({"models": models, "served_model_name": "large"})
    assert [each.values["served_model_name"] for each in named] == ["large", "small"], "the gateway's own is the first"
    assert [each.values for each in up.options_by_model({"model": models})] == [{"model": models}]


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"model": "elsewhere"}, "has no model 'elsewhere'"),
        ({"prefill": "1", "decode": "1"}, "--models: excludes PREFILL and DECODE"),
    ],
)
def test_options_that_exclude_the_file_are_refused(models: str, more: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        up.options_by_model({"models": models, **more})


def test_models_that_do_not_fit_together_are_refused_with_their_sizes() -> None:
    shares = [Share("small", GIB, 1), Share("large", 2 * GIB, 2, kv_fraction=0.1)]
    free = 10 * GIB  # 1 + (2 + 1) * 2, and work for each of the three workers
    assert sum_problem(shares, free) == ""
    assert sum_problem(shares, 7 * GIB) == (
        "2 models: need 7.9 GiB together (small 1.5, large 6.4 (2 workers)), 7.0 are free; choose fewer or smaller "
        "models, fewer workers, quantize, fewer kv_blocks or host_blocks, or a smaller kv_memory_fraction, "
        "or let them take turns (`awake: 1`)"
    )
    assert sum_problem([Share("huge", 8 * GIB, 1)], 7 * GIB).startswith(
        "1 model: need 8.5 GiB together (huge 8.5), 7.0"
    )


def test_config_of_another_model_than_the_weights_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "mixed"
    shutil.copytree(DEMO_MODEL, model)
    assert shape_problem(model, "auto") == ""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 128_256, "hidden_size": 8192}))
    assert shape_problem(model, "auto") == (
        f"{model}: tensor model.embed_tokens.weight has shape [4096, 256], config.json says [128256, 8192]; "
        "fetch config.json and weights again, both of the same model"
    )


@pytest.mark.parametrize(
    ("given", "vector_bytes", "blocks"),
    [
        ({}, 0, 0),
        ({"kv_blocks": 1000}, 4 * 64, 1000),
        ({"kv_blocks": 1000, "host_blocks": 500}, 4 * 64, 1500),
        ({"kv_blocks": 1000, "dtype": "bfloat16"}, 2 * 64, 1000),
        ({"kv_blocks": 1000, "kv_dtype": "int8"}, 64 + 4, 1000),
    ],
)
def test_blocks_that_are_given_count_for_each_worker(given: dict[str, Any], vector_bytes: int, blocks: int) -> None:
    plain = share_of(DEMO_MODEL, WorkerSettings(model=DEMO_MODEL, dtype=given.get("dtype", "float32")), 2)
    share = share_of(DEMO_MODEL, WorkerSettings(model=DEMO_MODEL, **{"dtype": "float32", "block_size": 32, **given}), 2)
    config = load_config(DEMO_MODEL)
    assert config.head_dim == 64
    block = 2 * config.layers * config.kv_heads * 32 * vector_bytes
    assert share.needed_bytes(0) - plain.needed_bytes(0) == 2 * blocks * block


def test_blocks_that_are_given_count_in_place_of_the_fraction() -> None:
    worker = WorkerSettings(model=DEMO_MODEL, kv_blocks=1, kv_memory_fraction=0.5)
    assert share_of(DEMO_MODEL, worker, 1).kv_fraction == 0.0


BAD: list[tuple[str, str]] = [
    ("kv_blocks: -1", "kv_blocks=-1: input should be greater than or equal to 0"),
    ("quantize: int2", "quantize=int2: input should be"),
    ("max_seqs: many", "max_seqs: Input should be a valid integer"),
    ("policy: fastest", "policy=fastest: "),
    ("kv_dtype: int8", "--kv-dtype int8 needs the cpu kernels, and --kernels reference"),
    ("workers: 1", "model directory {source} has no config.json; give the directory that has one (source)"),
]


@pytest.mark.parametrize(("line", "problem"), BAD)
def test_error_names_the_file_the_model_and_the_field(models: str, tmp_path: Path, line: str, problem: str) -> None:
    Path(models).write_text(f"models:\n  small: {{source: {DEMO_MODEL}}}\n  large: {{source: b, {line}}}\n")
    with pytest.raises(ConfigurationError) as refused:
        up.up({"models": models, "kernels": "reference", "run_dir": str(tmp_path / "run")}, check_policy)
    assert str(refused.value).startswith(f"{models}: model 'large': " + problem.format(source=tmp_path / "b"))
    assert not (tmp_path / "run").exists()


def test_error_of_an_option_for_all_models_names_the_option(models: str) -> None:
    (options, _) = up.options_by_model({"models": models, "max_seqs": "many"})
    with pytest.raises(ConfigurationError, match="--max-seqs=many: not a whole number; give one"):
        up.ModelStack.of(options)


def test_processes_are_counted_over_all_models(models: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "on_gpu", lambda worker: False)
    stacks = [up.ModelStack.of(each) for each in up.options_by_model({"models": models})]
    specs = up.process_specs(stacks, None, "unix:///x", None, None, tmp_path, {})
    found = [(spec.name, spec.env["ORCINUS_SERVED_MODEL_NAME"], spec.env.get("ORCINUS_WORKER_ID")) for spec in specs]
    assert found == [
        ("worker-0", "small", "worker-0"), ("scheduler-0", "small", None),
        ("worker-1", "large", "worker-1"), ("worker-2", "large", "worker-2"), ("scheduler-1", "large", None),
        ("gateway-0", "small", None),
    ]  # fmt: skip
    assert specs[-1].env["ORCINUS_MODELS"] == models


def test_models_that_take_turns_share_cores_and_gpus_and_have_a_placer(
    models: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "on_gpu", lambda worker: False)
    monkeypatch.setattr(up.os, "sched_getaffinity", lambda pid: range(8))
    stacks = [up.ModelStack.of(each) for each in up.options_by_model({"models": models})]
    assert (up.at_once(stacks, 0), up.at_once(stacks, 1)) == (3, 2)
    specs = up.process_specs(stacks, None, "unix:///x", None, None, tmp_path, {}, most=1)
    by_name = {spec.name: spec.env for spec in specs}
    assert by_name["worker-0"]["ORCINUS_THREADS"] == "4", "as many as the two of the other model have"
    assert by_name["placer-0"]["ORCINUS_MODELS"] == models
    assert [spec.name for spec in specs if "placer-0" in spec.after] == ["worker-0", "worker-1", "worker-2"]
    sleeping = up.sleeping_services(None, specs, 1)
    assert sleeping.asleep == {"worker-0", "worker-1", "worker-2"}
    monkeypatch.setattr(up, "on_gpu", lambda worker: True)
    specs = up.process_specs(stacks, None, "unix:///x", None, None, tmp_path, {}, most=1)
    gpus = {spec.name: spec.env["CUDA_VISIBLE_DEVICES"] for spec in specs if spec.name.startswith("worker-")}
    assert gpus == {"worker-0": "0", "worker-1": "0", "worker-2": "1"}


def test_only_models_that_are_awake_together_have_to_fit(models: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "on_gpu", lambda worker: False)
    monkeypatch.setattr(up, "check_model", lambda *_: None)
    monkeypatch.setattr(up, "share_of", lambda model, worker, replicas: Share(str(model), GIB, replicas))
    monkeypatch.setattr(up, "free_memory", lambda: 4 * GIB)  # 1.5 for one, 3 for the other
    stacks = [up.ModelStack.of(each) for each in up.options_by_model({"models": models})]
    up.check_models(stacks, 1)
    with pytest.raises(ConfigurationError, match=r"2 models: need 4.5 GiB together"):
        up.check_models(stacks)


class Placements:
    """A Redis that has these placements."""

    def __init__(self) -> None:
        self.awake: dict[str, bool] = {}
        self.reads = 0
        self.answers = threading.Event()
        self.answers.set()

    def hgetall(self, key: str) -> dict[bytes, bytes]:
        assert self.answers.wait(10), "the caller waits for the answer"
        self.reads += 1
        assert key == PLACER_KEYS.placements
        return {name.encode(): Placement(is_awake).encode() for name, is_awake in self.awake.items()} | {b"x": b"[]"}


def follow(sleeping: SleepingServices, redis: Placements) -> None:
    """Look until a wish that stands now was taken: a read begins when the one before was taken."""
    reads = redis.reads
    times = itertools.count()

    def is_taken() -> bool:
        sleeping.look(next(times))
        return redis.reads > reads + 2

    until("the wish is taken", is_taken)


def test_workers_follow_the_placer_and_no_wish_for_too_many() -> None:
    redis = Placements()
    sleeping = SleepingServices(redis, {"worker-0": "a", "worker-1": "b", "worker-2": "b", "worker-3": "c"}, 2)
    seen = []
    wishes: list[dict[str, bool]] = [{}, {"a": True, "b": False}, {"a": True, "b": True}, {"c": True, "foreign": True},
                                     {"a": True, "b": True, "c": True}, {"a": False}]  # fmt: skip
    for redis.awake in wishes:
        follow(sleeping, redis)
        seen.append((sleeping.is_read, sorted(sleeping.names - sleeping.asleep)))
    kept = (True, ["worker-3"])
    assert seen == [
        (False, []), (True, ["worker-0"]), (True, ["worker-0", "worker-1", "worker-2"]), kept, kept, kept
    ]  # fmt: skip


def test_placer_with_more_models_awake_than_the_file_is_named() -> None:
    redis = Placements()
    sleeping = SleepingServices(redis, {"worker-0": "a", "worker-1": "b", "worker-2": "c"}, 1)
    redis.awake = {"a": True, "b": True, "c": False}
    until("it is read again", lambda: sleeping.look(redis.reads) or redis.reads == 3)
    assert sleeping.problem == "", "it may be of the time before"
    until("it is named", lambda: sleeping.look(MISMATCH_S + 3) or sleeping.problem)
    assert sleeping.problem == "placer: 2 models awake, this file allows 1; give all engines the same file"
    assert not sleeping.is_read
    redis.awake = {"a": True}
    follow(sleeping, redis)
    assert sleeping.is_followed and sleeping.problem == "" and sleeping.asleep == {"worker-1", "worker-2"}
    redis.awake = {"a": True, "b": True}
    times = itertools.count(100)
    until("it is named again", lambda: sleeping.look(next(times)) or sleeping.problem)
    assert not sleeping.is_followed


def test_launcher_does_not_wait_for_a_silent_redis() -> None:
    redis = Placements()
    sleeping = SleepingServices(redis, {"worker-0": "a", "worker-1": "b"}, 1)
    redis.answers.clear()
    redis.awake = {"b": True}
    for now in range(3):
        sleeping.look(now)
    assert not sleeping.is_read
    redis.answers.set()
    follow(sleeping, redis)
    assert sleeping.asleep == {"worker-0"}


@pytest.mark.parametrize("is_given", [False, True])
def test_files_are_kept_in_the_run_directory_unless_a_folder_is_given(
    models: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_given: bool
) -> None:
    monkeypatch.setattr(up, "on_gpu", lambda worker: False)
    values = {"models": models, "run_dir": str(tmp_path / "run")}
    values |= {"files_dir": str(tmp_path / "mine")} if is_given else {}
    stacks = [up.ModelStack.of(each) for each in up.options_by_model(values)]
    gateway = up.process_specs(stacks, None, "unix:///x", None, None, tmp_path, {})[-1]
    expected = tmp_path / "mine" if is_given else tmp_path / "run" / "files"
    assert (gateway.env or {})["ORCINUS_FILES_DIR"] == str(expected)
