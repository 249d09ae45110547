"""What `orcinus up` gives each of several workers, and what it refuses."""

from __future__ import annotations

import os

import pytest

from services.launcher import up
from shared.errors import ConfigurationError
from shared.settings import WorkerSettings


def test_one_worker_gets_nothing_of_its_own() -> None:
    assert up.replica_env(WorkerSettings(), 0, 1) == {}


def test_workers_on_a_cpu_have_names_and_share_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "on_gpu", lambda worker: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    made = [up.replica_env(WorkerSettings(worker_metrics_port=9000), number, 3) for number in range(3)]
    assert [env["ORCINUS_WORKER_ID"] for env in made] == ["worker-0", "worker-1", "worker-2"]
    assert [env["ORCINUS_WORKER_METRICS_PORT"] for env in made] == ["9000", "9001", "9002"]
    assert {env["ORCINUS_THREADS"] for env in made} == {"2"}
    assert sum(float(env["ORCINUS_KV_MEMORY_FRACTION"]) for env in made) == pytest.approx(0.2, abs=1e-5)
    given = up.replica_env(WorkerSettings(threads=4, kv_memory_fraction=0.1, worker_id="here"), 1, 2)
    assert given == {"ORCINUS_WORKER_ID": "here-1"}


def test_workers_on_gpus_see_those_that_no_other_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "on_gpu", lambda worker: True)
    made = [up.replica_env(WorkerSettings(tp=2), number, 2)["CUDA_VISIBLE_DEVICES"] for number in range(2)]
    assert made == ["0,1", "2,3"]
    monkeypatch.setattr(up, "device_count", lambda: 3)
    with pytest.raises(ConfigurationError, match="each needs 2 GPUs of its own, this machine shows 3"):
        up._check_replicas(2, WorkerSettings(tp=2))


@pytest.mark.parametrize("settings", [{"listen": "127.0.0.1:5000"}, {"advertise": "10.0.0.1:5000"}])
def test_an_address_that_only_one_can_have_is_refused(settings: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="REPLICAS=2"):
        up._check_replicas(2, WorkerSettings(**settings))
