"""Several gateway processes behind one port: what a death takes along, what is counted, how they end."""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest

from deploy import certs
from protos import kserve_pb2, kserve_pb2_grpc
from shared.processes.listeners import reserve
from tests.chaos.streams import load
from tests.support.checkpoints.models import Reference
from tests.support.gateway.process import GatewayProcess
from tests.support.stack import PLAIN, ROOT, Stack, running_stack
from tests.support.waiting import free_port, until

STREAMS = 8
LONG = 600
ASKED = 40
"""Connections that one of two processes gets none of once in 10^11 runs."""
COMPLETED = 'orcinus_gateway_requests_total{code="200",endpoint="/v1/completions",process="%d"}'
CALLED = 'orcinus_gateway_requests_total{code="ok",endpoint="grpc/ModelReady",process="%d"}'
ACTIVE = 'orcinus_gateway_active_requests{process="%d"}'
"""Every process has it from its start."""
MODEL = {"requests": STREAMS, "output_tokens": 64, "max_position_embeddings": 4096, "seed": 20261122}


@pytest.fixture(scope="module")
def stack(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("stack")
    with running_stack(
        directory, reference.path, dtype="float32", max_seqs=16, threads=1, processes=2, ops_port=free_port(),
        grpc_port=free_port(), drain_s=30,
    ) as running:  # fmt: skip
        yield running


def ops(stack: Stack, path: str) -> httpx.Response:
    """Over a connection of its own, so that either process may answer."""
    return httpx.get(f"http://127.0.0.1:{stack.settings['ops_port']}{path}", timeout=60, verify=PLAIN)


def processes(stack: Stack) -> dict[int, str]:
    """Number -> id of the gateways that answer."""
    return {each["process"]: each["id"] for each in ops(stack, "/stats").json()["processes"]}


def both(stack: Stack) -> dict[int, str]:
    """Return them once both take requests: one that has just started refuses them until it has heard from Redis."""

    def found() -> dict[int, str]:
        there = ops(stack, "/stats").json()["processes"]
        ready = {each["process"]: each["id"] for each in there if each["not_ready"] is None}
        return ready if len(ready) == 2 else {}

    return until("both processes are ready", found, 60)


def is_listed_as_ready(stack: Stack) -> bool:
    """Ask whichever process takes a new connection. Its look at Redis may be a second old."""
    (model,) = httpx.get(f"{stack.url}/v1/models", timeout=60).json()["data"]
    return bool(model["state"] == "ready")


def pid(gateway: str) -> int:
    return int(gateway.split("-")[-2])


def counted(stack: Stack, name: str) -> list[float]:
    """Return a counter of each process, whichever of them tells. It leaves the other out if that is slow to answer."""

    def metrics() -> dict[str, str]:
        text = ops(stack, "/metrics").text
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return lines if all(ACTIVE % number in lines for number in (0, 1)) else {}

    lines = until("both processes tell", metrics)
    return [float(lines.get(name % number, 0)) for number in (0, 1)]


def gateway_of(stack: Stack, request: str) -> str:
    value = stack.redis.client.hget(stack.keys.req(request), "gateway")
    return value.decode() if isinstance(value, bytes) else ""


def test_both_processes_get_requests_and_count_their_own(stack: Stack) -> None:
    both(stack)
    before = counted(stack, COMPLETED)
    for _ in range(ASKED):
        stack.complete("x", 2)
    until("all are counted", lambda: sum(counted(stack, COMPLETED)) - sum(before) == ASKED)
    after = counted(stack, COMPLETED)
    assert all(now > then for now, then in zip(after, before, strict=True))
    answers = [ops(stack, "/stats").json() for _ in range(ASKED)]
    assert {each["gateway"]["id"] for each in answers} == set(both(stack).values())
    assert all(counted(stack, COMPLETED) == after for _ in range(8))
    text = ops(stack, "/metrics").text
    types = Counter(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    assert set(types.values()) == {1}  # each family once, or Prometheus refuses the whole
    assert all('process="' in line for line in text.splitlines() if not line.startswith("#"))


def test_calls_over_grpc_are_spread_too(stack: Stack) -> None:
    both(stack)
    until("both know the model as ready", lambda: all(is_listed_as_ready(stack) for _ in range(ASKED)))
    for _ in range(ASKED):
        own = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
        with grpc.insecure_channel(f"127.0.0.1:{stack.settings['grpc_port']}", own) as channel:
            ask = kserve_pb2_grpc.GRPCInferenceServiceStub(channel).ModelReady
            assert ask(kserve_pb2.ModelReadyRequest(name=stack.name), timeout=60).ready
    until("all are counted", lambda: sum(counted(stack, CALLED)) == ASKED)
    assert all(number > 0 for number in counted(stack, CALLED))


def test_killed_process_ends_no_other_stream_and_its_own_resume(stack: Stack, reference: Reference) -> None:
    before = both(stack)
    with load(stack, reference, LONG) as under_way:
        served_by = [gateway_of(stack, stream.request) for stream in under_way.streams]
        assert set(served_by) <= set(before.values())
        victim = served_by[0]
        (number,) = (number for number, gateway in before.items() if gateway == victim)
        os.kill(pid(victim), signal.SIGKILL)
        under_way.check(LONG)
        for stream, gateway in zip(under_way.streams, served_by, strict=True):
            assert (stream.resumed > 0) == (gateway == victim)
    after = both(stack)
    assert after[1 - number] == before[1 - number] and after[number] != victim
    stack.settled_empty()


def test_restarted_process_counts_anew_beside_the_other(stack: Stack) -> None:
    before, counts = both(stack), counted(stack, COMPLETED)
    for _ in range(ASKED):
        stack.complete("x", 1)
    until("all are counted", lambda: sum(counted(stack, COMPLETED)) - sum(counts) == ASKED)
    kept = counted(stack, COMPLETED)[1]
    assert kept > 0
    os.kill(pid(before[0]), signal.SIGKILL)
    until("it is back", lambda: both(stack)[0] != before[0])
    assert counted(stack, COMPLETED) == [0, kept]
    for _ in range(ASKED):
        stack.complete("x", 1)
    until("all are counted", lambda: sum(counted(stack, COMPLETED)) - kept == ASKED)
    assert counted(stack, COMPLETED)[0] > 0


def drained(stack: Stack, name: str) -> list[dict[str, Any]]:
    ended = subprocess.run(
        [sys.executable, "-m", "services.cli", "drain", name, "--json", "--timeout-s", "60"],
        env=stack.environment(), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return list(json.loads(ended.stdout)["services"])


def leaves(stack: Stack, gateway: str) -> bool:
    """It drains, or has gone already."""
    found = {each["id"]: each["draining"] for each in ops(stack, "/stats").json()["processes"]}
    return found.get(gateway, True)


def test_drained_process_leaves_its_port_the_last_ends_the_gateway(stack: Stack, reference: Reference) -> None:
    there = both(stack)
    with load(stack, reference, LONG) as under_way:
        stack.redis.client.set(stack.keys.drain("gateway", there[0]), 1, px=60_000)
        until("it leaves", lambda: leaves(stack, there[0]))
        for _ in range(ASKED):
            stack.complete("x", 1)  # none of these is refused
        under_way.check(LONG)
        assert [stream.resumed for stream in under_way.streams] == [0] * STREAMS
    until("it has left", lambda: processes(stack) == {1: there[1]})
    until("the parent has noticed", lambda: "process 0 was drained" in stack.log("gateway"))
    alive = stack.keys.alive("gateway", "*")
    until("heartbeats of killed ones have run out", lambda: len(list(stack.redis.client.scan_iter(alive))) == 1)
    (last,) = drained(stack, "gateway")
    assert last["id"] == there[1]
    assert stack.wait("gateway") == 0
    stack.start("gateway")
    until("the stack is ready", stack.ready, 60)


def test_sigterm_ends_processes_after_their_streams(stack: Stack, reference: Reference) -> None:
    there = both(stack)
    with load(stack, reference, LONG) as under_way:
        assert stack.kill("gateway", signal.SIGTERM) == 0
        under_way.check(LONG)
        assert [stream.resumed for stream in under_way.streams] == [0] * STREAMS
    assert not [gateway for gateway in there.values() if psutil.pid_exists(pid(gateway))]


# Without a stack


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone")


@pytest.fixture(scope="module")
def whole(reference: Reference, directory: Path) -> Iterator[GatewayProcess]:
    certs.make(directory, [])
    gateway = GatewayProcess(
        directory, reference.path, f"redis://127.0.0.1:{free_port()}/0", processes=2, grpc_port=free_port(),
        tls_cert=directory / "gateway.pem", tls_key=directory / "gateway-key.pem",
    )  # fmt: skip
    yield gateway
    gateway.stop()


@pytest.fixture
def alone(whole: GatewayProcess) -> GatewayProcess:
    """Two processes without a Redis, with gRPC; started again where the test before ended them."""
    if whole.process is None or whole.process.poll() is not None:
        served = whole.log().count("serving gRPC") if whole.process else 0
        whole.start()
        until("both serve", lambda: whole.log().count("serving gRPC") == served + 2, 60)
    return whole


def starting(gateway: GatewayProcess, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Another one that is to refuse."""
    changed = {f"ORCINUS_{name.upper()}": str(value) for name, value in settings.items()}
    return subprocess.run(
        [sys.executable, "-m", "services.cli", "gateway"],
        env={**gateway.environment, **changed}, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_second_gateway_of_same_user_is_refused_each_of_ports(alone: GatewayProcess) -> None:
    fresh = {"port": free_port(), "ops_port": free_port(), "grpc_port": free_port(), "processes": 2}
    for name, text in (("port", "port"), ("ops_port", "ops port"), ("grpc_port", "gRPC")):
        port = alone.environment[f"ORCINUS_{name.upper()}"]
        refused = starting(alone, **{**fresh, name: port})
        assert refused.returncode == 2, refused.stderr
        (said,) = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
        assert text in said and port in said and "serving demo" not in refused.stderr


def test_wrong_settings_are_reported_once_and_end_the_parent(alone: GatewayProcess, tmp_path: Path) -> None:
    fresh = {"port": free_port(), "ops_port": free_port(), "grpc_port": 0, "processes": 3}
    refused = starting(alone, **fresh, model=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.count("error: ") == 1 and "config.json is missing" in refused.stderr


def test_sighup_gives_every_process_the_new_certificate(alone: GatewayProcess, directory: Path) -> None:
    assert alone.process is not None
    certs.make(directory, [])
    trusted = ssl.create_default_context(cafile=str(directory / "ca.pem"))

    def renewed() -> bool:
        try:
            url = f"https://127.0.0.1:{alone.port}/health/live"
            return all(httpx.get(url, verify=trusted, timeout=60).status_code == 200 for _ in range(ASKED))
        except httpx.TransportError:
            return False

    assert not renewed()
    alone.process.send_signal(signal.SIGHUP)
    until("both show it", renewed)
    until("both have said so", lambda: alone.log().count("certificate reloaded") == 2)


def test_an_interrupt_at_the_terminal_reaches_only_the_parent(alone: GatewayProcess) -> None:
    """With the parent's SIGTERM it would be the second signal, which cuts streams."""
    assert alone.process is not None
    children = psutil.Process(alone.process.pid).children()
    assert len(children) == 2
    assert os.getpgid(alone.process.pid) not in {os.getpgid(each.pid) for each in children}


def test_sigusr1_shows_the_stacks_of_every_process_and_ends_none(alone: GatewayProcess) -> None:
    assert alone.process is not None
    alone.process.send_signal(signal.SIGUSR1)
    until("the stacks are in the log", lambda: alone.log().count("most recent call first") >= 2)
    assert len(psutil.Process(alone.process.pid).children()) == 2


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_its_parent(alone: GatewayProcess, how: int) -> None:
    assert alone.process is not None
    children = psutil.Process(alone.process.pid).children(recursive=True)
    assert len(children) >= 2
    assert alone.stop(how) == (-how if how == signal.SIGKILL else 0)
    until("all have ended", lambda: not [each for each in children if each.is_running()])
    with reserve("127.0.0.1", alone.port, "port"):
        pass
