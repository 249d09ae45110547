"""Processes: listeners of a reserved port, collections, restarts, lines of the log."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from shared.errors import ConfigurationError
from shared.processes.heap import THRESHOLDS, freeze_imports, settle
from shared.processes.listeners import handed_on, listen, reserve
from shared.processes.restarts import Backoff
from shared.telemetry import logs
from tests.support.launcher import ROOT, clean_env
from tests.support.waiting import free_port

HOST = "127.0.0.1"


def sharing(port: int) -> socket.socket:
    """Return a listener with SO_REUSEPORT, as a gRPC server opens it."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((HOST, port))
    listener.listen()
    return listener


@pytest.mark.parametrize("listening", [False, True])
def test_reserved_port_takes_only_listeners_that_share_it(listening: bool) -> None:
    port = free_port()
    with contextlib.ExitStack() as held:
        held.enter_context(reserve(HOST, port, "port"))
        if listening:
            for _ in range(2):
                held.enter_context(sharing(port))
        for refused in (lambda: reserve(HOST, port, "port"), lambda: listen(HOST, port, "port")):
            with pytest.raises(ConfigurationError, match=f"port {port} on {HOST} is in use"):
                refused()
    reserve(HOST, port, "port").close()


@pytest.mark.parametrize("opened", [sharing, lambda port: listen(HOST, port, "port")])
def test_port_with_a_listener_is_not_reserved(opened: Callable[[int], socket.socket]) -> None:
    port = free_port()
    with opened(port), pytest.raises(ConfigurationError, match="is in use"):
        reserve(HOST, port, "port")


def test_reservation_takes_no_connection_of_the_listeners() -> None:
    port = free_port()
    with reserve(HOST, port, "port"), sharing(port) as listener:
        listener.settimeout(10)
        for _ in range(50):
            with socket.create_connection((HOST, port), timeout=60):
                listener.accept()[0].close()


ANSWER = """
from shared.processes.listeners import listen
listener = listen("127.0.0.1", {port}, "port")
listener.setblocking(True)
listener.accept()[0].sendall(b"hello")
"""


def test_child_serves_the_clients_that_wait_in_its_supervisors_socket() -> None:
    port = free_port()
    with listen(HOST, port, "port") as held, socket.create_connection((HOST, port), timeout=60) as client:
        client.settimeout(30)
        subprocess.run(
            [sys.executable, "-c", ANSWER.format(port=port)],
            env={**os.environ, **handed_on({"port": held})}, pass_fds=[held.fileno()], timeout=60, check=True,
        )  # fmt: skip
        assert client.recv(16) == b"hello"


def test_descriptor_that_does_not_listen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as idle:
        for given, problem in ((str(idle.fileno()), "does not listen"), ("99999", "Bad file"), ("x", "invalid")):
            monkeypatch.setenv("SUPERVISOR_SOCKETS", f"ops port=3,port={given}")
            with pytest.raises(ConfigurationError, match=f"port={given}: .*{problem}.*; unset it"):
                listen(HOST, free_port(), "port")
        assert idle.fileno() > 0


@pytest.fixture
def thresholds() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    yield before
    gc.unfreeze()
    gc.set_threshold(*before)


def test_what_lives_at_start_is_never_walked_again_and_full_collections_are_rare(
    thresholds: tuple[int, int, int],
) -> None:
    early: list[object] = [[]]
    settle()
    late: list[object] = [[]]
    watched = {id(each) for each in gc.get_objects()}
    assert id(early) not in watched and id(late) in watched
    young, middle, full = THRESHOLDS
    assert gc.get_threshold()[:2] == (young, middle)
    # A count has to be beyond its threshold, and a collection of older objects stands in for one of younger ones.
    assert 12_000_000 < (young + 1) * (middle + 2) * (full + 2) < 12_100_000


@pytest.mark.usefixtures("thresholds")
def test_collection_short_of_a_full_one_looks_at_few_objects() -> None:
    settle()
    sizes: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 1:
            sizes.append(len(gc.get_objects(0)) + len(gc.get_objects(1)))

    gc.callbacks.append(note)
    kept: list[object] = [[] for _ in range(100_000)]
    gc.callbacks.remove(note)
    assert len(kept) == 100_000 and sizes and max(sizes) < 10_000


@pytest.mark.usefixtures("thresholds")
def test_an_import_has_no_collections_also_one_that_fails() -> None:
    with pytest.raises(ModuleNotFoundError), freeze_imports():
        assert not gc.isenabled()
        raise ModuleNotFoundError
    assert gc.isenabled() and gc.get_freeze_count() > 0


def delays(backoff: Backoff, lives: list[tuple[float, float | None]]) -> list[float]:
    """lives: (seconds from the death before to this one, seconds ready or None)."""
    found, record, now = [], list[float](), 1000.0
    for lasted_s, ready_s in lives:
        now += lasted_s
        record = backoff.with_death(record, now, ready_s)
        found.append(backoff.delay_s(len(record)))
    return found


def test_restart_delay_doubles_until_a_process_lives_long() -> None:
    backoff = Backoff(first_s=1, factor=2, cap_s=5, window_s=60, settled_s=30)
    short = [(1.0, 0.5)] * 5
    assert delays(backoff, [*short, (31.0, 29.9), (31.0, 30.0), (1.0, 0.5)]) == [1, 2, 4, 5, 5, 5, 1, 2]


def test_restart_delay_resets_when_ready_without_settled_time() -> None:
    backoff = Backoff(first_s=1, factor=2, cap_s=5)
    assert delays(backoff, [(1.0, None), (1.0, None), (1.0, 0.0), (1.0, None)]) == [1, 2, 1, 2]


def test_restart_delay_counts_deaths_in_the_window() -> None:
    backoff = Backoff(first_s=1, factor=2, cap_s=100, window_s=60)
    assert delays(backoff, [(0.0, None), (30.0, None), (31.0, None), (59.0, None), (61.0, None)]) == [1, 2, 2, 2, 1]


LOG = "from shared.telemetry import logs; log = logs.setup('worker', as_json={as_json}); {call}"


def line(as_json: bool, model: str = "", call: str = "log.info('ready')") -> str:
    """Return what a process logs after its supervisor has named a model."""
    env = clean_env(**({logs.MODEL: model} if model else {}))
    command = [sys.executable, "-c", LOG.format(as_json=as_json, call=call)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stderr


def test_line_names_the_model_where_there_are_several() -> None:
    assert line(False).endswith(" INFO orcinus.worker: ready\n")
    assert line(False, "org/50%s").endswith(" INFO orcinus.worker of org/50%s: ready\n")
    assert "model" not in json.loads(line(True))
    assert json.loads(line(True, "org/Two"))["model"] == "org/Two"


FOREIGN = (
    "/v1/x\n2026-01-01 00:00:00 ERROR orcinus.gateway: all keys are revoked\x1b[2J\x9b1A\u2028\x7f\U000e0041 größer"
)
"""A path as a client sent it, decoded."""


def test_foreign_text_begins_no_line_and_drives_no_terminal() -> None:
    said = line(False, call=f"log.info('client of %s left', {FOREIGN!r})")
    assert said.count("\n") == 1 and len(said.splitlines()) == 1
    assert said.endswith(r"are revoked\x1b[2J\x9b1A\u2028\x7f\U000e0041 größer left" + "\n")
    as_json = line(True, call=f"log.info('%s', {FOREIGN!r})")
    assert as_json.removesuffix("\n").isprintable() and json.loads(as_json)["text"] == FOREIGN


def test_traceback_keeps_its_lines_and_drives_no_terminal() -> None:
    call = "exec('try: raise ValueError(chr(27) + chr(99))\\nexcept ValueError: log.exception(chr(10))')"
    said = line(False, call=call)
    assert said.splitlines()[0].endswith(r"ERROR orcinus.worker: \n")
    assert said.splitlines()[-1] == r"ValueError: \x1bc" and "Traceback" in said
